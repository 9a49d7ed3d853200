"""`edgelm serve`: the endpoint for other programs and for the chat."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping

from edgelm.commands.choice import chosen_model
from edgelm.config import load_config
from edgelm.server.serving import ServeOptions, serve


def serve_models(
    models: list[str], flags: Mapping[str, object], *, until_stdin_closes: bool, as_json: bool, verbose: bool
) -> None:
    """Serve until interrupted. Raises EdgeLMError."""
    config = load_config(flags)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # one line for each request to an engine says nothing
    paths = [chosen_model(model, config).path for model in models]

    def announce(address: str) -> None:
        if as_json or until_stdin_closes:
            print(json.dumps({"address": address}), flush=True)
        else:
            print(f"edgelm listens at {address}/v1 (Ctrl-C ends it)", flush=True)

    options = ServeOptions(paths, until_stdin_closes=until_stdin_closes, verbose=verbose)
    serve(config.settings, config.places, options, announce)
