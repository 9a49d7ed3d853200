"""`edgelm` without a command: open the terminal chat."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from edgelm.config import SETTINGS, Config, load_config
from edgelm.errors import EdgeLMError
from edgelm.library.local import runnable_model


def open_chat(endpoint: str | None, model: str | None, flags: Mapping[str, object], api_key: str | None = None) -> None:
    """Run the chat until the user leaves it. Raises EdgeLMError."""
    config = load_config(flags)
    # Textual draws on standard error.
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise EdgeLMError("the chat needs a terminal", "use `edgelm run MODEL` in scripts; --help shows all commands")
    from edgelm.client.addresses import normalize_address
    from edgelm.tui.app import ChatApp
    from edgelm.tui.link import Link
    from edgelm.tui.workspace import ChatDefaults

    settings, sources, places = config.settings, config.sources, config.places
    by_path = False
    if model and endpoint is None:
        local = runnable_model(model, config)
        by_path = local.place == "given"
        model = str(local.path) if by_path else local.name  # a running server may have another working directory
    # Flags need a server of our own: a running server has its own settings.
    own = [_as_flag(name, value) for name, value in flags.items() if value is not None]
    arguments = [*own, *([model] if model and by_path else [])]
    link = Link(
        endpoint=normalize_address(endpoint) if endpoint else None,
        api_key=api_key or _choose_key(endpoint, config),
        runtime=places.runtime,
        log=places.cache / "serve.log",
        arguments=arguments,
        share=not own,
    )
    per_model = {name for table in config.models for name in table.settings} if endpoint is None else set()

    def is_own(name: str) -> bool:
        """Return whether the chat sends a setting; what config.toml has for some models, our own server knows."""
        return sources[name] != "default" and (sources[name].startswith(("--", "EDGELM_")) or name not in per_model)

    options = {
        name: value
        for name, setting in SETTINGS.items()
        if setting.sampling and is_own(name) and (value := getattr(settings, name)) is not None
    }
    app = ChatApp(
        places.data / "chats.db", link, ChatDefaults(model or "", options), knowledge=places.cache / "knowledge.db"
    )
    app.run()
    if app.num_lost:
        raise EdgeLMError(f"the last {app.num_lost:,} changes of the chats were not saved", "the reason is above")


def _as_flag(name: str, value: object) -> str:
    """Return a flag as the user gave it."""
    spelled = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{spelled}" if value else f"--no-{spelled}"
    return f"--{spelled}={value}"


def _choose_key(endpoint: str | None, config: Config) -> str | None:
    """Return the key to send. The key in config.toml is for our own server: a named endpoint does not get it."""
    explicit = config.sources["api_key"].startswith(("--", "EDGELM_"))
    return config.settings.api_key if endpoint is None or explicit else None
