"""`edgelm pull`: a model from the hub to this machine.

Owns what is shown: a moving display on a terminal, plain lines elsewhere, on standard error; the path or one JSON
document on standard output. The work is library/pull.py's.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from edgelm.commands.choice import model_dirs
from edgelm.commands.pull_display import display_for
from edgelm.config import Config, load_config
from edgelm.errors import EdgeLMError
from edgelm.library.catalog import hub_reference
from edgelm.library.events import Pulled
from edgelm.library.hub import Hub
from edgelm.library.local import find_local, require_whole
from edgelm.library.names import HubReference, shown
from edgelm.library.pull import prepare, pull
from edgelm.library.units import size_text, time_text


def pull_model(
    model: str | None,
    *,
    quantization: str | None,
    revision: str | None,
    connections: int,
    dry_run: bool,
    offline: bool,
    as_json: bool,
) -> None:
    """Pull a model, or say what that would be; without a name, one is chosen from a list.

    Raises EdgeLMError where it fails: what came is kept.
    """
    if model is None and (model := _picked()) is None:
        return
    config = load_config({})
    reference = _reference(model, quantization, revision)
    if offline or (not dry_run and _is_set_offline()):
        _print_local(reference, model, config, as_json=as_json)
        return
    hub = Hub(config.places.hub_endpoint, config.places.hub)
    if dry_run:
        from edgelm.commands.pull_preview import show_preview

        show_preview(prepare(reference, hub), hub, config, as_json=as_json)
        return
    with display_for(sys.stderr) as display:
        try:
            pulled = pull(reference, hub, display.show, connections=connections)
        except KeyboardInterrupt:
            display.close()
            print(f"interrupted: {display.kept()}", file=sys.stderr)
            raise
    if as_json:
        files = [{"path": file.path, "bytes": file.size} for file in display.files]
        document = {"model": str(reference), "path": str(pulled.path), "bytes": pulled.nbytes}
        more = {"fetched_bytes": pulled.fetched, "seconds": round(pulled.seconds, 3), "files": files}
        print(json.dumps({**document, **more}, ensure_ascii=False))
        return
    print(_summary(pulled), file=sys.stderr)
    print(pulled.path)


def _picked() -> str | None:
    """Return the model that the user chooses on the terminal, None for none."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise EdgeLMError("no model is named, and there is no terminal to choose one", "name it: edgelm pull qwen3:4b")
    from edgelm.tui.picker import pick_model

    return pick_model()


def _reference(model: str, quantization: str | None, revision: str | None) -> HubReference:
    reference = hub_reference(model)
    if quantization is not None:
        if not quantization.strip():
            raise EdgeLMError("--quant is empty", "give a quantization such as Q4_K_M")
        reference = replace(reference, quantization=quantization.strip().upper(), file=None)
    return replace(reference, revision=revision) if revision else reference


def _is_set_offline() -> bool:
    """Tell whether HF_HUB_OFFLINE is set, as the hub client reads it."""
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())


def _print_local(reference: HubReference, model: str, config: Config, *, as_json: bool) -> None:
    """Print where the model is on this machine. Opens no connection."""
    try:
        found = find_local(str(reference), config.places.hub, model_dirs(config), paths=False)
        require_whole(found)
    except EdgeLMError:
        raise EdgeLMError(f"{shown(model)} is not here, or not whole", "pull it without --offline") from None
    nbytes = sum(file.stat().st_size for file in found.files)
    if as_json:
        files = [{"path": file.name, "bytes": file.stat().st_size} for file in found.files]
        document = {"model": str(reference), "path": str(found.path), "bytes": nbytes}
        print(json.dumps({**document, "fetched_bytes": 0, "seconds": 0.0, "files": files}, ensure_ascii=False))
        return
    print(f"{size_text(nbytes)} here", file=sys.stderr)
    print(found.path)


def _summary(pulled: Pulled) -> str:
    if not pulled.fetched:
        return f"all of it is here: {size_text(pulled.nbytes)}"
    rate = f" ({size_text(pulled.fetched / pulled.seconds)}/s)" if pulled.seconds > 0 else ""
    return f"pulled {size_text(pulled.fetched)} in {time_text(pulled.seconds)}{rate}"
