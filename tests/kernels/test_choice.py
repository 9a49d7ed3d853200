"""The choice of an op's implementation, and the error if none takes the arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edgelm.kernels import choice
from edgelm.kernels.choice import Implementation, NoKernelError, choose, declines_reference, declines_triton

REPOSITORY = Path(__file__).resolve().parents[2]
EVEN = Implementation("even", lambda x: None if x % 2 == 0 else f"{x} is odd", lambda x: x // 2)
SMALL = Implementation("small", lambda x: None if x < 10 else f"{x} is large", lambda x: x)


class OnGpu:
    """The attributes of a GPU tensor that the choice reads."""

    is_cuda = True
    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("requested", "x", "name"),
    [(None, 4, "even"), (None, 3, "small"), (None, 12, "even"), ("small", 4, "small"), ("even", 4, "even")],
)
def test_the_first_that_takes_it_or_the_requested_one(requested, x, name):
    assert choose("half", [EVEN, SMALL], requested, x).name == name


@pytest.mark.parametrize(
    ("requested", "x", "message"),
    [
        (None, 13, "no implementation of half takes this: even: 13 is odd; small: 13 is large"),
        ("small", 12, "no implementation of half takes this: small: 12 is large"),
        ("third", 4, "no implementation of half takes this: none is named third"),
    ],
)
def test_the_error_says_why_each_declined(requested, x, message):
    with pytest.raises(NoKernelError) as caught:
        choose("half", [EVEN, SMALL], requested, x)
    assert str(caught.value) == message


def test_the_interpreter_takes_cpu_tensors():
    assert choice.interpreting()
    assert declines_triton(torch.zeros(1)) is None
    assert declines_reference(torch.zeros(1), None) is None


def test_without_the_interpreter_triton_declines_the_cpu(monkeypatch):
    monkeypatch.setattr(choice, "interpreting", lambda: False)
    assert declines_triton(torch.zeros(1)) == "the tensors are on cpu"


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    assert declines_triton(torch.zeros(1)) == "triton is not installed"


@pytest.mark.parametrize(
    ("interpreting", "capability", "reason"),
    [
        (False, (9, 0), None),
        (False, (8, 0), None),
        (False, (7, 5), "the GPU is older than sm_80"),
        (True, (9, 0), "TRITON_INTERPRET is set, and the tensors are on a GPU"),
    ],
)
def test_on_a_gpu(monkeypatch, interpreting, capability, reason):
    monkeypatch.setattr(choice, "interpreting", lambda: interpreting)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert declines_triton(OnGpu()) == reason


def test_on_a_gpu_the_reference_runs_only_when_it_is_named():
    assert declines_reference(OnGpu(), "reference") is None
    assert declines_reference(OnGpu(), None) is not None


def test_ops_are_imported_and_run_without_triton():
    """A machine without a GPU has no Triton: only modules of device code may import it."""
    program = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
from edgelm.kernels import choice, matmul
import edgelm.kernels
for module in pkgutil.iter_modules(edgelm.kernels.__path__):
    if module.name not in ("unpack", "pdl"):  # device code
        importlib.import_module(f"edgelm.kernels.{module.name}")
import torch
from edgelm.kernels.layout import DenseWeight
print(matmul.matmul(torch.ones(2, 3), DenseWeight(torch.ones(4, 3)), implementation="reference").sum().item())
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "24.0\n"
