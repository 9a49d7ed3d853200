"""`edgelm` without a command: the terminal chat."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from edgelm.commands.choice import chosen_model
from edgelm.config import Config, load_config
from edgelm.errors import EdgeLMError

OF_ENGINE = ("ctx", "kv", "threads", "spec", "draft", "engine", "device", "gpu_layers", "graphs", "quantize")
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")


def open_chat(endpoint: str | None, model: str | None, flags: Mapping[str, object], api_key: str | None = None) -> None:
    """Show the chat until the user leaves it. Raises EdgeLMError."""
    config = load_config(flags)
    # Textual draws on standard error.
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise EdgeLMError("the chat needs a terminal", "use `edgelm run MODEL` in scripts; --help shows all commands")
    from edgelm.client.endpoint import normalize_address
    from edgelm.tui.app import ChatApp
    from edgelm.tui.link import Link
    from edgelm.tui.open_chat import Wishes

    settings, sources, places = config.settings, config.sources, config.places
    by_path = False
    if model and endpoint is None:
        found = chosen_model(model, config)
        by_path = found.place == "given"
        model = str(found.path) if by_path else found.name  # a server that runs already may stand in another folder
    # Engine flags are for an engine of our own: one that runs already has its own settings.
    own = [_as_flag(name, flags[name]) for name in OF_ENGINE if flags.get(name) is not None]
    arguments = [*own, *([model] if model and by_path else [])]
    link = Link(
        endpoint=normalize_address(endpoint) if endpoint else None,
        api_key=api_key or _choose_key(endpoint, config),
        runtime=places.runtime,
        log=places.cache / "serve.log",
        arguments=arguments,
        share=not own,
    )
    options = {
        name: value
        for name in OF_SAMPLING
        if sources.get(name, "default") != "default" and (value := getattr(settings, name)) is not None
    }
    app = ChatApp(places.data / "chats.db", link, Wishes(model or "", options))
    app.run()
    if app.lost:
        raise EdgeLMError(f"the last {app.lost:,} changes of the chats were not saved", "see above why")


def _as_flag(name: str, value: object) -> str:
    """Return a flag as the user gave it."""
    spelled = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{spelled}" if value else f"--no-{spelled}"
    return f"--{spelled}={value}"


def _choose_key(endpoint: str | None, config: Config) -> str | None:
    """Return the key to send. The one in config.toml is our own server's: no endpoint that was named gets it."""
    given = config.sources["api_key"].startswith(("--", "EDGELM_"))
    return config.settings.api_key if endpoint is None or given else None
