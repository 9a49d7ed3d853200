"""Starts `edgelm serve` with the clients' models, in places of its own. Needs a network namespace with loopback.

They are one that knows nothing and always calls a tool, SmolLM2, and an encoder for embeddings.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.clients.model import CONTEXT, write_model
from tests.ending import end_server
from tests.real_models import real_model
from tests.tiny_bert import tiny_bert, write_bert

START_LIMIT_S = 300.0
MODEL = "clients"
REAL = "SmolLM2-135M-Instruct.Q4_1"
ENCODER = "encoder"


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run a front with the clients' models while the block runs; yield its address."""
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "config.toml").write_text(f"[models.{MODEL}]\nctx = {CONTEXT}\n")
    others = [real_model("smollm2"), write_bert(tiny_bert(), folder / f"{ENCODER}.gguf")]
    assert others[0].stem == REAL
    with serving_model(folder, write_model(folder / f"{MODEL}.gguf"), {}, others) as address:
        yield address


@contextmanager
def serving_model(folder: Path, model: Path, settings: dict[str, str], others: Sequence[Path] = ()) -> Iterator[str]:
    """Run a front with models while the block runs; yield its address. Its log is `folder/serve.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "HF_"))}
    places = {f"EDGELM_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME", "CACHE")}
    environment = clean | places | {"HF_HOME": str(folder / "hf")} | settings
    command = [sys.executable, "-m", "edgelm", "serve", "--port", "0", "--json", "--parallel", "4"]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, str(model), *map(str, others)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
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
