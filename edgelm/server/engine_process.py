"""An engine process of a front: loads one model and serves it on a socket of its own (its protocol: process.py).

Its events are progress, then ready or error. Ends when the front closes its standard input or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from edgelm.build import Loaded
from edgelm.config import Settings
from edgelm.errors import EdgeLMError
from edgelm.process import Emit, run_process
from edgelm.server.engine_app import LEAST_BYTES, EngineParts, engine_app
from edgelm.server.listener import Server, bind_tcp, bind_unix
from edgelm.text.template_worker import TemplateRunner


def main() -> int:
    """Serve the model of the job that standard input names, until standard input closes."""
    os.umask(0o077)
    return run_process(_serve)


async def _serve(loaded: Loaded, job: dict[str, Any], emit: Emit) -> None:
    socket_path: str | None = job.get("socket")
    listener = bind_tcp("127.0.0.1", 0) if socket_path is None else bind_unix(Path(socket_path))
    info = loaded.engine.info
    emit(
        event="ready",
        name=loaded.name,
        engine=info.engine,
        device=info.device,
        context=info.context,
        port=listener.getsockname()[1] if socket_path is None else None,
    )
    templates = TemplateRunner(loaded.tokenizer, loaded.chats)
    warming = asyncio.create_task(_warm_up(templates))
    parts = EngineParts(loaded, templates, Settings(**job["settings"]), job.get("owner", ""))
    try:
        await Server(engine_app(parts, job["key"])).serve(sockets=[listener])
    finally:
        warming.cancel()
        await templates.close()


async def _warm_up(templates: TemplateRunner) -> None:
    """Start the template's process before the first request waits for it, which then meets what is wrong with it."""
    with contextlib.suppress(EdgeLMError):
        await templates.render_tokens([{"role": "user", "content": "Hello"}], max_bytes=LEAST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
