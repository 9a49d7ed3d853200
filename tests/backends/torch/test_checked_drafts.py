"""The check of a GPU's kernels tries what every step does to a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from edgelm.backends.model import open_model
from edgelm.backends.torch import self_check
from edgelm.backends.torch.self_check import Comparison
from edgelm.kernels.choice import Implementation
from edgelm.kernels.delta import reference
from tests.odd_models import write_odd


def test_a_kernel_that_moves_states_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observe = Comparison.observe

    def observed(self: Comparison, op: str, _: Implementation, plain: Implementation, args: Sequence[Any]) -> Any:
        if op != "gated_delta":
            return plain
        kernel = plain._replace(run=partial(reference.gated_delta, *args))
        return observe(self, op, kernel, plain, tuple(args))

    monkeypatch.setattr(Comparison, "observe", observed)
    with open_model(write_odd(tmp_path / "m.gguf", "qwen35")) as model:
        verdicts = self_check.check_model(model, torch.device("cpu"), torch.float32, ["f16"])
    assert len(verdicts) > 3
    assert [verdict for verdict in verdicts if not verdict.right] == []
