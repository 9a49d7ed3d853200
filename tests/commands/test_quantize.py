"""`edgelm quantize` as a user sees it: the table of types, one line for each error, and nothing left by a kill."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.disk import unfinished
from edgelm.base.errors import BusyError, EdgeLMError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.commands.quantize import list_types, quantize_model
from edgelm.commands.quantize_flags import QuantizeFlags
from edgelm.jobs.reader import describe
from edgelm.library.scan import scan
from tests.commands.test_run import TIMEOUT_S, Edgelm, children_of, error_of, gone
from tests.counts import Count
from tests.tiny import write_tiny

KILLS = Count(test=3, soak=20)
FLAGS = QuantizeFlags(to="Q8_0", calibration_tokens=512, threads=1)


def folder_of(name: str, folder: Path, **changes: Any) -> Path:
    from tests.making.conversion.folders import folder_of as write  # takes torch, in each process that collects tests

    return write(name, folder, **changes)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "wide.gguf"
    return write_tiny(path, width=256, heads=4, kv_heads=4, head_dim=64, ffn=512)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return an empty folder for new files."""
    path = tmp_path / "place"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("llama2", tmp_path_factory.mktemp("folders") / "tiny-llama", num_hidden_layers=2)


def test_a_model_is_quantized_and_its_types_are_printed(edgelm: Edgelm, source: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.gguf"
    done = edgelm("quantize", source, new, "--to", "q4_k_m", "--calibration-tokens", "512")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0].startswith(f"{new}: ")
    assert {line.split()[0] for line in lines[2:-1]} == {"Q4_K", "Q6_K", "F32"}
    assert lines[-1] == f"what it costs: edgelm eval {new} TEXT --against {source}"
    assert not done.stderr
    assert describe(new)["quantization"] == "Q4_K_M"  # in `edgelm list`


def test_a_folder_is_quantized_in_one_go(edgelm: Edgelm, folder: Path, place: Path) -> None:
    new = place / "new.gguf"
    (place / ".killed.edgelm-source.gguf").write_bytes(b"left by a process that was killed")
    done = edgelm("quantize", folder, new, "--to", "Q8_0", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["source"] == str(folder)  # the GGUF between them is gone
    assert {row["type"] for row in document["types"]} == {"Q8_0", "F32"}
    assert [path.name for path in place.iterdir()] == ["new.gguf"]
    assert describe(new)["quantization"] == "Q8_0"
    wrong = edgelm("quantize", folder, place / "other.gguf", "--to", "Q8_0", "--output-type", "Q9")
    assert "Q9" in error_of(wrong, code=2)
    assert [path.name for path in place.iterdir()] == ["new.gguf"]


def test_types_are_chosen_by_a_size(edgelm: Edgelm, folder: Path, place: Path) -> None:
    text = place / "text.txt"
    text.write_text("Once upon a time there was a little girl who said hello to the world. " * 60)
    new = place / "new.gguf"
    arguments = ("quantize", folder, new, "--no-imatrix", "--calibration", text)
    done = edgelm(*arguments, "--budget", "9bpw")
    assert done.returncode == 0, done.stderr
    assert re.search(r"all types together: \d\.\d+, on [\d,]+ tokens", done.stdout.decode())
    with open_gguf(new) as made:
        weights = sum(tensor.num_elements for tensor in made.tensors.values())
        assert made.size <= 9 * weights / 8
    measured = kept_measurements(edgelm)
    assert measured
    assert edgelm(*arguments, "--to", "auto", "--fits", "--force").returncode == 0
    assert kept_measurements(edgelm) == measured  # the folder was converted again, and its measurements still count
    with open_gguf(new) as made:
        assert {tensor.type.name for tensor in made.tensors.values()} == {"F16", "F32"}
    message = error_of(edgelm(*arguments, "--budget", "1kB", "--force"), code=1)
    assert re.search(r"no types make this model as small as .*; give at least ", message)
    assert sorted(path.name for path in place.iterdir()) == ["new.gguf", "text.txt"]


def test_a_kill_leaves_no_converted_copy(edgelm: Edgelm, place: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    folder = folder_of("llama2", tmp_path / "wide", **sizes)
    new = place / "new.gguf"
    process = edgelm.start("quantize", folder, new, "--to", "IQ2_XS")  # its tables take seconds
    wait_until(lambda: any(place.glob("*new.gguf*")))
    children = children_of(process.pid)
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: all(gone(child) for child in children))
    assert not list(place.glob(".*"))


def test_another_process_keeps_its_converted_copy(folder: Path, place: Path) -> None:
    copy = place / ".new.edgelm-source.gguf"
    copy.write_bytes(b"of another process")
    with copy.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="another process quantizes to this file"):
            quantize_model(str(folder), str(place / "new.gguf"), FLAGS, as_json=False, verbose=False)
    assert [path.name for path in place.iterdir()] == [".new.edgelm-source.gguf"]


def test_flags_that_would_do_nothing_are_refused(edgelm: Edgelm, folder: Path, place: Path) -> None:
    new = place / "new"
    message = error_of(edgelm("quantize", folder, new, "--to", "int4", "--pure", "--budget", "3GiB"), code=2)
    assert "--budget, --pure cannot be given with --to int4; omit them" in message
    message = error_of(edgelm("quantize", folder, f"{new}.gguf", "--to", "Q8_0", "--group", "64"), code=2)
    assert "--group cannot be given with a type of llama.cpp; omit it" in message
    assert not list(place.iterdir())


def test_all_types_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    list_types(as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert {row["type"]: row["bits"] for row in rows}["Q4_K_M"] == 4.5
    list_types(as_json=False)
    words = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["IQ2_XXS", "2.06", "needs an importance matrix"] in [[part.strip() for part in line] for line in words]


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("--to is missing", {"to": None}),
        ("did you mean Q4_K_M", {"to": "Q4KM"}),
        ("IQ2_XXS needs an importance matrix", {"to": "IQ2_XXS", "no_imatrix": True}),
        ("mixture for a whole file", {"output_type": "Q4_K_M"}),
        ("does not go with", {"imatrix": "i.gguf", "calibration": "t.txt"}),
        ("--pure means nothing for F16", {"to": "F16", "pure": True}),
        ("--to auto needs a size", {"to": "AUTO"}),
        ("--budget and --fits are two sizes", {"to": None, "budget": "5bpw", "fits": True}),
        ("--to Q4_K_M does not go with a size", {"to": "Q4_K_M", "budget": "5bpw"}),
        ("'5 apples' is no size of a file", {"to": "auto", "budget": "5 apples"}),
        ("--output-type and --embedding-type do not go with a size", {"to": None, "fits": True, "output_type": "Q8_0"}),
        ("is no place for a file", {"save_imatrix": "none/i.gguf"}),
        ("/dev/null is no file", {"calibration": "/dev/null"}),
        ("/dev/null is no file", {"imatrix": "/dev/null"}),
        ("missing.gguf", {"source": "./missing.gguf"}),
        ("is the source itself", {"destination": "SOURCE", "force": True}),
        ("exists already; name another file, or replace it with --force", {"destination": "old.gguf"}),
        ("is a folder; name a file in it", {"destination": "."}),
        ("the folder .* does not exist", {"destination": "none/new.gguf"}),
        ("call it new.gguf", {"destination": "new"}),
    ],
)
def test_wrong_flags_are_one_line(
    message: str, changes: dict[str, Any], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.gguf").write_bytes(b"old")
    first = changes.pop("source", str(source))
    new = changes.pop("destination", "new.gguf").replace("SOURCE", str(source))
    flags = replace(FLAGS, **changes)
    with pytest.raises(EdgeLMError, match=message):
        quantize_model(first, new, flags, as_json=False, verbose=False)
    assert [path.name for path in tmp_path.iterdir()] == ["old.gguf"]


def test_ctrl_c_ends_the_work_and_leaves_nothing(edgelm: Edgelm, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    source = write_tiny(folder / "slow.gguf", layers=8, width=256, heads=4, kv_heads=4, head_dim=64, ffn=1024)
    process = edgelm.start("quantize", source, folder / "new.gguf", "--to", "IQ2_XS", "--calibration-tokens", "512")
    wait_until(lambda: any(folder.glob(".new.gguf*")))
    (worker,) = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert errors.decode() == "note: stopped; new.gguf was not written. The same command starts over\n"
    assert gone(worker)
    assert [path.name for path in folder.iterdir()] == ["slow.gguf"]


@pytest.mark.timeout(30 * KILLS + 120)
def test_kills_at_random_points_leave_nothing_half_written(edgelm: Edgelm, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    source = write_tiny(folder / "source.gguf", layers=4, width=256, heads=4, kv_heads=4, head_dim=64, ffn=1024)
    new = folder / "new.gguf"
    arguments = ("quantize", source, new, "--to", "Q4_K_M", "--no-imatrix", "--force")
    duration = 2.0
    if KILLS > 3:  # then as long as it takes here
        started = time.monotonic()
        assert edgelm(*arguments).returncode == 0
        duration = time.monotonic() - started
        new.unlink()
    rng = random.Random(int(os.environ["KERNEL_SEED"]))
    for number in range(KILLS):
        process = edgelm.start(*arguments)
        # Half of the kills are anywhere, the others while the file is written.
        if number % 2:
            time.sleep(rng.uniform(0, duration))
        else:
            wait_until(partial(is_written, process, folder))
            time.sleep(rng.uniform(0, duration / 4))
        children = children_of(process.pid)
        victims = [[process.pid], children, [process.pid, *children]][number % 3]
        for victim in victims:
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert all(gone(child) for child in children)
        assert b"Traceback" not in errors
        listed = {model.path.name for model in scan(folders=[folder]).models if model.place != "built-in"}
        whole = new.exists()
        if whole:  # it was renamed before the kill
            with open_gguf(new) as made:
                assert made.tensors["blk.3.ffn_up.weight"].type.name == "Q4_K"
            new.unlink()
        assert listed == ({"source.gguf", "new.gguf"} if whole else {"source.gguf"})
        left = sorted(path.name for path in folder.iterdir())
        unfinished(new).unlink(missing_ok=True)  # the next kill waits for the next one
        print(f"kill {number + 1}: {len(victims)} processes, file {'whole' if whole else 'absent'}, left {left}")
    unfinished(new).write_bytes(b"of a process that was killed")
    assert edgelm(*arguments).returncode == 0
    with open_gguf(new) as made:
        assert made.tensors["blk.3.ffn_up.weight"].type.name == "Q4_K"
    assert sorted(path.name for path in folder.iterdir()) == ["new.gguf", "source.gguf"]


def kept_measurements(edgelm: Edgelm) -> list[str]:
    folder = Path(edgelm.environment["EDGELM_CACHE_DIR"]) / "sensitivity"
    return sorted(path.name for path in folder.iterdir())


def is_written(process: subprocess.Popen[bytes], folder: Path) -> bool:
    """Tell whether a file is being written, or has been."""
    return process.poll() is not None or any("new.gguf" in path.name for path in folder.iterdir())


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
