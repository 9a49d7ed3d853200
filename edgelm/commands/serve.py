"""`edgelm serve`: run the endpoint for other programs and for the chat."""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from edgelm.base.config import load_config
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.runtime import FrontRecord
from edgelm.base.workers.messages import Serving
from edgelm.base.workers.wire import Saving, encode
from edgelm.commands.flags import Flags, Json, SettingsOf, Verbose
from edgelm.commands.running import model_or_served
from edgelm.library.readers import Describe, read_each
from edgelm.server import request_log
from edgelm.server.keys import check_secret
from edgelm.server.listener import inherited_listener
from edgelm.server.serving import ServeOptions, serve

log = logging.getLogger(__name__)


def serve_models(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="More models to offer.")] = None,
    *,
    flags: Annotated[Flags, SettingsOf("serve")],
    ask_key: Annotated[bool, typer.Option("--ask-key", help="Ask here for a key that clients must send.")] = False,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False,
    until_unused: Annotated[bool, typer.Option("--until-unused", hidden=True)] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Serve until interrupted. Raises EdgeLMError, also for a given file that is no whole model."""
    start_server(
        models or [],
        flags,
        ask_key=ask_key,
        until_stdin_closes=until_stdin_closes,
        until_unused=until_unused,
        as_json=as_json,
        verbose=verbose,
    )


def start_server(
    models: Sequence[str],
    flags: Flags,
    *,
    ask_key: bool = False,
    until_stdin_closes: bool = False,
    until_unused: bool = False,
    as_json: bool = False,
    verbose: bool = False,
    say: Callable[[FrontRecord], None] | None = None,
    renew: Callable[[], None] | None = None,
) -> None:
    """Serve until interrupted; `say` prints another line than ours when the server listens. Raises EdgeLMError.

    `renew` makes the certificate again where it has to be, while the server runs.
    """
    listener = inherited_listener()  # first: no child may take its variables
    config = load_config(flags)
    _log_to_stderr(config.settings.log_format, verbose=verbose)
    if config.sources["api_key"].startswith("--"):
        message = "other users of this machine can see the key of --api-key in the list of processes"
        log.warning("warning: %s; give --api-key-file, --ask-key or EDGELM_API_KEY", message)
    typed_key = _ask_key() if ask_key else None
    paths = [model_or_served(model, config).path for model in models]
    for document in read_each(Describe(path) for path in paths):
        if "error" in document:
            raise ModelError(document["error"])

    def announce(front: FrontRecord) -> None:
        if until_stdin_closes:  # our parent reads it, and needs the key
            print(encode(Serving(front.address, front.key, front.certificate)).decode(), end="", flush=True)
        elif say is not None:
            say(front)
        elif as_json:
            more = {"ollama_address": front.ollama} if front.ollama else {}
            print(json.dumps({"event": "serving", "address": front.address, **more}), flush=True)
        else:
            ollama = f", and for Ollama's clients at {front.ollama}" if front.ollama else ""
            print(f"edgelm listens at {front.address}/v1{ollama} (Ctrl-C ends it)", flush=True)

    def on_saving(num_left: int) -> None:
        if until_stdin_closes:  # our parent waits longer for it
            with contextlib.suppress(OSError):
                print(encode(Saving(num_left)).decode(), end="", flush=True)

    options = ServeOptions(
        paths,
        typed_key,
        until_stdin_closes=until_stdin_closes,
        until_unused=until_unused,
        verbose=verbose,
        listener=listener,
        renew=renew,
    )
    serve(config, options, announce, on_saving)


def _log_to_stderr(log_format: str, *, verbose: bool) -> None:
    """Set up the log; in JSON it has a line for each request."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # one line for each request to an engine is noise
    if log_format == "json":
        request_log.log.setLevel(logging.INFO)
        for handler in logging.getLogger().handlers:
            handler.setFormatter(request_log.JsonLines())


def _ask_key() -> str:
    """Return a key that the user types. Raises EdgeLMError without a terminal."""
    if not sys.stdin.isatty():
        raise EdgeLMError("--ask-key asks at a terminal, and there is none", "give --api-key-file")
    try:
        key = getpass.getpass("Key that clients must send: ", stream=sys.stderr)
    except EOFError:
        raise EdgeLMError("no key was typed", "start again, or give --api-key-file") from None
    check_secret(key, "the key")
    return key
