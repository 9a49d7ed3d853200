"""The check of a GPU's kernels tries what every draft does to a recurrent state."""

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


def forgets_accepted(spans: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Begin at the first row, as if the state were there."""
    spans[:, 1] = seq_lens - query_start_loc.diff()


def keeps_drafts(spans: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Move the state to the last row, as if no draft could be rejected."""
    spans[:, 2] = seq_lens


@pytest.mark.parametrize("spoil", [None, forgets_accepted, keeps_drafts])
def test_a_kernel_that_is_wrong_for_drafts_is_found(
    spoil: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = Comparison.observe

    def observed(self: Comparison, op: str, _: Implementation, plain: Implementation, args: Sequence[Any]) -> Any:
        if op != "gated_delta":
            return plain
        spans = args[7].clone()
        if spoil:
            spoil(spans, args[8], args[9])
        run = partial(reference.gated_delta, *args[:7], spans, *args[8:])
        return observe(self, op, plain._replace(run=run), plain, tuple(args))

    monkeypatch.setattr(Comparison, "observe", observed)
    with open_model(write_odd(tmp_path / "m.gguf", "qwen35")) as model:
        verdicts = self_check.check_model(model, torch.device("cpu"), torch.float32, ["f16"])
    assert len(verdicts) > 3
    assert all(verdict.right for verdict in verdicts) == (spoil is None)
