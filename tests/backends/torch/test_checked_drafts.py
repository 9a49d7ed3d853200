"""The check of a GPU's kernels tries what every draft does to a recurrent state, and the head that drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgelm.backends.gpu_check import CheckGpu, GpuVerdict, OpVerdict
from edgelm.backends.kept_verdicts import kept_verdict
from edgelm.backends.model import open_heads, open_model
from edgelm.backends.torch import check_worker, self_check
from edgelm.backends.torch.kept_checks import check_key, keep_whole
from edgelm.backends.torch.self_check import Comparison, described
from edgelm.base.config import Settings
from edgelm.kernels.choice import Implementation
from edgelm.kernels.delta import reference
from tests import odd_models
from tests.odd_models import WIDTH, write_odd
from tests.tiny import write_tiny


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


@pytest.mark.parametrize(("apart", "short"), [(False, True), (True, False)])
def test_a_kernel_that_is_wrong_for_the_head_is_found(
    apart: bool, short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the model's own file, and in one beside it: no other matrix is as wide as the head's projection."""
    observe = Comparison.observe
    projection = f"{WIDTH}x{2 * WIDTH}"

    def observed(self: Comparison, op: str, _: Implementation, plain: Implementation, args: Sequence[Any]) -> Any:
        if op != "matmul":
            return plain
        run = plain.run if projection not in described(args) else lambda *a, **named: plain.run(*a, **named) * 1.5
        return observe(self, op, plain._replace(run=run), plain, tuple(args))

    monkeypatch.setattr(Comparison, "observe", observed)
    for name, size in {"FFN": 96, "DELTA_HEADS": 2, "DELTA_GROUPS": 1}.items():
        monkeypatch.setattr(odd_models, name, size)
    monkeypatch.setattr(self_check, "LONG_PROMPT", 0)
    model = write_odd(tmp_path / "m.gguf", "qwen35", heads=0.5, part="model" if apart else "all")
    heads = write_odd(tmp_path / "mtp-m.gguf", "qwen35", heads=0.5, part="heads") if apart else None
    sent: list[Any] = []
    child: Any = SimpleNamespace(send=sent.append)
    monkeypatch.setitem(check_worker.DTYPES, "cpu", torch.float32)
    request = CheckGpu(model, ("f16",), "off", short=short, heads=heads)
    check_worker.check(request, child, device=torch.device("cpu"), trial=lambda _: None)
    wrong = [verdict for verdict in sent[-1].verdicts if not verdict.right]
    assert {projection in verdict.detail for verdict in wrong} == {True}
    assert len(sent[-1].verdicts) > 2 * len(wrong)
    with open_model(model) as alone, open_heads(alone, heads) as opened:
        keys = [check_key(one, Settings(), "f16") for one in (alone, opened)]
    assert (keys[0] != keys[1]) is apart, "the kept verdict is of these heads"


def test_the_check_of_a_load_sees_products_of_queries_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention of a first token sees one key, whatever its product with the query is."""
    observe = Comparison.observe

    def observed(self: Comparison, op: str, _: Implementation, plain: Implementation, args: Sequence[Any]) -> Any:
        if op != "attention":
            return plain
        without_query = plain._replace(run=lambda query, *rest, **named: plain.run(query * 0, *rest, **named))
        return observe(self, op, without_query, plain, tuple(args))

    monkeypatch.setattr(Comparison, "observe", observed)
    with open_model(write_tiny(tmp_path / "m.gguf")) as model:
        verdicts = self_check.check_model(model, torch.device("cpu"), torch.float32, ["f16"], short=True)
    assert len(verdicts) >= 2, "a prompt's and a token's"
    assert not any(verdict.right for verdict in verdicts)


def test_a_model_is_checked_without_a_head_that_cannot_be_loaded(tmp_path: Path) -> None:
    with (
        open_model(write_odd(tmp_path / "m.gguf", "qwen35", heads=0.5, drop="blk.4.ffn_up")) as model,
        torch.inference_mode(),
    ):
        _, head = self_check._some_layers(model, torch.device("cpu"), torch.float32, "off")
    assert head is None


@pytest.mark.parametrize("beside", [False, True])
def test_a_verdict_without_a_head_that_lacks_a_matrix_is_not_that_of_a_whole_head(beside: bool, tmp_path: Path) -> None:
    """Its other matrices have the shape of the one that it lacks."""
    keys = []
    for name, drop in (("whole", "-"), ("lacking", "blk.4.ffn_up")):
        part: odd_models.Part = "model" if beside else "all"
        model = write_odd(tmp_path / f"{name}.gguf", "qwen35", heads=0.5, part=part, drop="-" if beside else drop)
        heads = write_odd(tmp_path / f"mtp-{name}.gguf", "qwen35", heads=0.5, part="heads", drop=drop)
        with open_model(model) as alone, open_heads(alone, heads if beside else None) as opened:
            keys.append(check_key(opened, Settings(), "f16"))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("right", [True, False])
def test_a_verdict_with_heads_is_that_of_the_model_alone_unless_a_kernel_is_wrong(right: bool, tmp_path: Path) -> None:
    """`doctor --gpu` checks with the heads beside a model, and `eval` does without them."""
    model = write_odd(tmp_path / "m.gguf", "qwen35", heads=0.5, part="model")
    heads = write_odd(tmp_path / "mtp-m.gguf", "qwen35", heads=0.5, part="heads")
    verdict = GpuVerdict("GPU X", verdicts=(OpVerdict("matmul", "of the head", right=right),))
    with open_model(model) as alone, open_heads(alone, heads) as opened:
        keep_whole(opened, Settings(), ["f16"], tmp_path, verdict)
        kept = [kept_verdict(tmp_path, check_key(one, Settings(), "f16")) for one in (opened, alone)]
    assert kept == [verdict, verdict if right else None]
