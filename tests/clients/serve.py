"""Starts `edgelm serve` with the clients' model, in places of its own. Needs a network namespace with loopback."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clients.model import CONTEXT, write_model
from tests.ending import end_server

START_LIMIT_S = 300.0
MODEL = "clients"


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run a front with the clients' model while the block runs; yield its address."""
    with serving_model(folder, write_model(folder / f"{MODEL}.gguf"), {"EDGELM_CTX": str(CONTEXT)}) as address:
        yield address


@contextmanager
def serving_model(folder: Path, model: Path, settings: dict[str, str]) -> Iterator[str]:
    """Run a front with a model while the block runs; yield its address. Its log is `folder/serve.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "HF_"))}
    places = {f"EDGELM_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME", "CACHE")}
    environment = clean | places | {"HF_HOME": str(folder / "hf")} | settings
    command = [sys.executable, "-m", "edgelm", "serve", "--port", "0", "--json", "--parallel", "4"]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        )
        try:
            assert process.stdout
            ready, _, _ = select.select([process.stdout], [], [], START_LIMIT_S)
            line = process.stdout.readline() if ready else b""
            if not line:
                raise RuntimeError(f"edgelm serve did not start: {(folder / 'serve.log').read_text()[-2000:]}")
            yield json.loads(line)["address"]
        finally:
            end_server(process)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    with serving(place) as address:
        environment = os.environ | {"EDGELM_ADDRESS": address, "EDGELM_MODEL": MODEL}
        raise SystemExit(subprocess.run(sys.argv[2:], env=environment, check=False).returncode)
