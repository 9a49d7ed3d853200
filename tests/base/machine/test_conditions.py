"""The line that says on what a figure was measured."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from edgelm import __version__
from edgelm.base.machine import conditions as module
from edgelm.base.machine.conditions import Conditions, Measurement, conditions, joined
from edgelm.base.machine.cpu import processor_name, usable_cores
from edgelm.base.machine.llama_build import find_build

MEASURED = Conditions("0.6", "edgelm-llama 0.3.36", "AMD EPYC", 8, 0.1)


def test_the_line_says_whether_the_machine_was_quiet() -> None:
    line = "measured with edgelm 0.6, edgelm-llama 0.3.36, on AMD EPYC with 8 cores"
    assert str(MEASURED) == f"{line}, quiet"
    assert str(replace(MEASURED, others=1.26)) == f"{line}, busy: others used 1.3 of them"
    assert str(replace(MEASURED, others=None)) == line
    assert str(replace(MEASURED, cores=1, others=None)).endswith("with 1 core")
    assert Conditions(**asdict(MEASURED)) == MEASURED


def test_they_are_of_this_machine_and_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    build = find_build()
    here = conditions("llama", 0.123)
    assert here == Conditions(
        __version__, f"{build.package} {build.version}", processor_name(), usable_cores().physical, 0.12
    )
    monkeypatch.setattr(module, "version", lambda package: {"torch": "2.9", "triton": "3.5"}[package])
    assert conditions("torch", None).build == "torch 2.9, triton 3.5"
    monkeypatch.setattr(module.OtherLoad, "cores", lambda _: 1.75)
    assert Measurement().conditions("llama").others == 1.75


def test_several_that_differ_only_in_the_load_are_one_the_busiest() -> None:
    busy, other = replace(MEASURED, others=1.5), replace(MEASURED, build="torch 2.9")
    assert joined([MEASURED, other, busy, replace(MEASURED, others=None)]) == [busy, other]


def test_the_name_of_the_processor(tmp_path: Path) -> None:
    assert processor_name(tmp_path)  # the architecture, where Linux does not say
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Ryzen: 9\nflags\t: avx2\n")
    assert processor_name(tmp_path) == "Ryzen: 9"
