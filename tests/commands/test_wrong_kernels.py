"""Commands start their workers without the kernels that are wrong on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from edgelm.base.config import Settings
from edgelm.base.machine.facts import NO_AMX, MachineFacts
from edgelm.base.places import Places
from edgelm.base.workers.messages import RunJob
from edgelm.commands import job, quantize
from edgelm.making.quantization.job import QuantizeJob
from edgelm.making.quantization.recipe import Recipe


class StartedError(Exception):
    """The worker would be started now."""


def run(model: Path, places: Places) -> None:
    with job.run_job(RunJob(model=model, settings=Settings(), prompt="x"), places, False) as replies:
        list(replies)


def make_smaller(model: Path, places: Places) -> None:
    quantize_job = QuantizeJob(source=model, destination=model.with_name("new.gguf"), recipe=Recipe("Q4_0"))
    with quantize._worker(quantize_job, places, verbose=False) as replies:
        list(replies)


@pytest.mark.parametrize(("module", "command"), [(job, run), (quantize, make_smaller)])
def test_amx_alone_is_switched_off(
    module: ModuleType, command: Callable[[Path, Places], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environments: list[dict[str, str | None]] = []

    def start(*_: object, environment: dict[str, str | None], **__: object) -> None:
        environments.append(environment)
        raise StartedError

    monkeypatch.setattr(module, "Worker", start)
    monkeypatch.setattr(module.machine, "facts", lambda *_, **__: MachineFacts(canary="no_amx", reason="crashes"))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(StartedError):
        command(tmp_path / "m.gguf", Places({"EDGELM_CACHE_DIR": str(tmp_path)}))
    assert environments[0].items() >= NO_AMX.items()
