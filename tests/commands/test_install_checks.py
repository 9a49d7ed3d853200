"""The commands that packaging/dist_check.py runs: edgelm accepts them, and a wrong kernel would change their output.

Only a release runs that script in full.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"
sys.path.insert(0, str(PACKAGING))
import dist_check  # noqa: E402 - a script that is no package
from smoke import SmokeError  # noqa: E402 - as above

sys.path.remove(str(PACKAGING))
LIMIT_S = 120


def ask(arguments: tuple[str, ...], environment: dict[str, str]) -> Any:
    command = [sys.executable, "-m", "edgelm", *arguments]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_first_question_is_answered(server_environment: dict[str, str]) -> None:
    assert "your own machine" in ask(dist_check.QUESTION, server_environment)["text"]


def test_the_text_that_variants_are_compared_by_is_no_repetition(server_environment: dict[str, str]) -> None:
    answer = ask(dist_check.DECODE, server_environment)
    assert len(answer["token_ids"]) == 40
    assert len(set(answer["token_ids"])) >= dist_check.MIN_DIFFERENT, answer["text"]
    assert answer["speculation"]["drafted"] == 0, "tokens that are drafted together use other kernels"
    assert answer["timings"]["decode_tokens_per_second"] > 0


@pytest.mark.parametrize("name", ["libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"])
def test_what_every_system_has_may_be_needed(name: str) -> None:
    assert dist_check.SYSTEM_LIBRARIES.fullmatch(name)


@pytest.mark.parametrize("name", ["libgomp.so.1", "libvulkan.so.1", "libcuda.so.1", "libcurl.so.4"])
def test_what_slim_images_lack_may_not_be_needed(name: str) -> None:
    assert not dist_check.SYSTEM_LIBRARIES.fullmatch(name)


def test_a_command_on_a_terminal_is_seen_and_its_failure_too(tmp_path: Path) -> None:
    shown = dist_check.run_on_terminal(["/bin/sh", "-c", "echo told > /dev/tty"], tmp_path, {})
    assert shown.splitlines() == ["told"]
    with pytest.raises(SmokeError, match=r"exit 3 of(.|\n)*broken"):
        dist_check.run_on_terminal(["/bin/sh", "-c", "echo broken; exit 3"], tmp_path, {})
