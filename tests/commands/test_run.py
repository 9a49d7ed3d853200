"""`edgelm run` as a user sees it: exit codes, and one line for each error."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from unittest.mock import patch

import pytest
import typer

from edgelm.base.errors import USAGE_EXIT_CODE
from edgelm.commands import cli
from edgelm.commands.cli import run_cli
from tests.tiny import write_tiny

TIMEOUT_S = 60
WILD = ("--temperature", "1.5", "--top-k", "0", "--min-p", "0", "--top-p", "1", "--seed", "5")


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, measured_cache: Path) -> dict[str, str]:
    """An environment with its own folders; the machine is measured once for all tests."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(measured_cache, home / "cache")
    places = {f"EDGELM_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE")}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDGELM_")}
    clean.pop("PYTHONUNBUFFERED", None)  # a user's output is buffered, and fails when it is flushed
    return clean | places


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", context=512)


class Edgelm:
    """`edgelm` with an environment: called in this process, or started as one of its own where that is tested."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.command = [sys.executable, "-m", "edgelm"]

    def __call__(self, *arguments: str | Path, stdin: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command in this process, which has imported it. Its workers are processes, as ever."""
        words = ["edgelm", *map(str, arguments)]
        with ExitStack() as stack:
            streams = [stack.enter_context(TemporaryFile("w+", encoding="utf-8")) for _ in range(3)]
            streams[0].buffer.write(stdin)
            streams[0].seek(0)
            stack.enter_context(patch.dict(os.environ, self.environment | more, clear=True))
            stack.enter_context(patch.object(sys, "argv", words))
            for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
                stack.enter_context(patch.object(sys, name, stream))
            try:
                code = run_cli()
            except KeyboardInterrupt:  # as edgelm/__main__.py has it; pytest would end the whole run
                code = 130
            for stream in streams[1:]:
                stream.seek(0)  # which writes what is buffered
            return subprocess.CompletedProcess(words, code, *(stream.buffer.read() for stream in streams[1:]))

    def process(self, *arguments: str | Path, stdin: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command as a user does."""
        return subprocess.run(
            [*self.command, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            timeout=TIMEOUT_S,
            env=self.environment | more,
            check=False,
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self.command, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
        )


@pytest.fixture
def edgelm(environment: dict[str, str]) -> Edgelm:
    return Edgelm(environment)


NOTE = re.compile(rb"(note: the answer is incomplete: [^\n]+; raise --max-tokens\n)?")  # where a limit cuts it


def error_of(done: subprocess.CompletedProcess[bytes], code: int = 1) -> str:
    """Return the one line on standard error of a failed command."""
    assert done.returncode == code, done
    lines = [line for line in done.stderr.decode().splitlines() if not line.startswith("loading ")]  # a slow machine's
    assert len(lines) == 1, done.stderr.decode()
    assert lines[0].startswith("error: ")
    return lines[0]


def test_an_aborted_command_is_exit_code_130(edgelm: Edgelm) -> None:
    with patch.object(cli, "app", side_effect=typer.Abort):  # as a prompt at the end of its input
        done = edgelm("run")
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_version_and_help(edgelm: Edgelm) -> None:
    assert re.fullmatch(rb"edgelm \d+\.\d+\.\d+(\.dev\d+)?\n", edgelm.process("--version").stdout)
    assert b"run" in edgelm.process("--help").stdout
    assert b"--temperature" in edgelm.process("run", "--help").stdout


@pytest.mark.parametrize("arguments", [["fly"], ["run"], ["run", "m", "p", "--seed", "x"], ["run", "m", "--wings"]])
def test_wrong_usage_is_exit_code_2_and_one_line(edgelm: Edgelm, arguments: list[str]) -> None:
    done = edgelm.process(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1


def test_an_answer_goes_to_standard_output_and_nothing_else_does(edgelm: Edgelm, model: Path) -> None:
    # Drafts change the shape of batches, and with it the last bits of the logits.
    first = edgelm.process("run", model, "hello", "--max-tokens", "12", "--seed", "3", "--spec", "off")
    assert first.returncode == 0
    assert first.stdout.endswith(b"\n")
    assert len(first.stdout) > 1
    assert NOTE.fullmatch(first.stderr)
    settings = {"EDGELM_MAX_TOKENS": "12", "EDGELM_SEED": "3", "EDGELM_SPEC": "off"}
    assert edgelm.process("run", model, stdin=b"hello", **settings).stdout == first.stdout
    assert edgelm("run", model, "hello", "--max-tokens", "12", "--seed", "4").stdout != first.stdout


def test_json_is_one_document_with_all_fields(edgelm: Edgelm, model: Path) -> None:
    done = edgelm("run", model, "the day", "--json", "--temperature", "0", "--max-tokens", "9")
    result = json.loads(done.stdout)
    assert set(result) >= {"model", "text", "token_ids", "finish_reason", "usage", "timings", "speculation"}
    assert set(result["usage"]) == {"prompt_tokens", "cached_tokens", "completion_tokens"}
    assert set(result["timings"]) == {
        "queue_ms", "prompt_ms", "first_token_ms", "decode_ms", "decode_tokens_per_second",
    }  # fmt: skip
    assert set(result["speculation"]) == {"drafted", "accepted"}
    assert 0 <= result["speculation"]["accepted"] <= result["speculation"]["drafted"]
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) <= 9
    assert result["finish_reason"] in {"stop", "length"}
    timings = result["timings"]
    assert timings["first_token_ms"] == pytest.approx(timings["queue_ms"] + timings["prompt_ms"], abs=0.01)


def test_prompt_and_standard_input_are_joined(edgelm: Edgelm, model: Path) -> None:
    arguments = ("run", model, "--json", "--temperature", "0", "--max-tokens", "3")
    joined = json.loads(edgelm(*arguments, "once", stdin=b"upon a time").stdout)
    whole = json.loads(edgelm(*arguments, "once\n\nupon a time").stdout)
    assert joined["token_ids"] == whole["token_ids"]
    assert joined["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_a_chat_template_is_used_unless_raw_is_given(edgelm: Edgelm, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    path = write_tiny(tmp_path / "chat.gguf", chat_template=template)
    arguments = ("run", path, "--json", "--temperature", "0", "--max-tokens", "4")
    chat = json.loads(edgelm(*arguments, "the day").stdout)
    raw = json.loads(edgelm(*arguments, "the day", "--raw").stdout)
    written = json.loads(edgelm(*arguments, "[user] the day", "--raw").stdout)
    assert chat["token_ids"] == written["token_ids"]
    assert chat["usage"]["prompt_tokens"] == written["usage"]["prompt_tokens"] > raw["usage"]["prompt_tokens"]
    (tmp_path / "other.jinja").write_text("{{ messages[0].content }} and more")
    other = json.loads(edgelm(*arguments, "the day", "--template", tmp_path / "other.jinja").stdout)
    assert other["token_ids"] == json.loads(edgelm(*arguments, "the day and more", "--raw").stdout)["token_ids"]


def test_an_answer_repeats_where_it_is_demanded(edgelm: Edgelm, tmp_path: Path) -> None:
    arguments = (
        "run",
        write_tiny(tmp_path / "tiny.gguf", quant="q8_0", context=512),
        "hello",
        "--json",
        "--repeatable",
        "--seed",
        "1",
        "--temperature",
        "1",
    )
    first, second = (json.loads(edgelm(*arguments, "--max-tokens", "20").stdout) for _ in range(2))
    assert first["token_ids"] == second["token_ids"] != []


def test_the_sampling_that_a_file_recommends_holds_until_a_flag_says_otherwise(edgelm: Edgelm, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "greedy.gguf", context=512, temperature=0.0)

    def answer(*flags: str) -> list[int]:
        ids: list[int] = json.loads(edgelm("run", path, "hello", "--json", "--max-tokens", "20", *flags).stdout)[
            "token_ids"
        ]
        return ids

    greedy = answer("--temperature", "0")
    assert answer("--seed", "1") == answer("--seed", "2") == greedy
    assert answer("--seed", "1", "--temperature", "1") != greedy


def test_a_broken_chat_template_is_one_line(edgelm: Edgelm, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "chat.gguf", chat_template="{% for x in range(10**12) %}{% endfor %}{{ 1 / 0 }}")
    assert "template" in error_of(edgelm("run", path, "hi"))


def test_a_stop_string_ends_the_answer_before_it(edgelm: Edgelm, model: Path) -> None:
    arguments = ("run", model, "hello", "--json", "--temperature", "0", "--max-tokens", "40")
    text = json.loads(edgelm(*arguments).stdout)["text"]
    stop = text[6:9]
    stopped = json.loads(edgelm(*arguments, "--stop", stop).stdout)
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == len(stopped["token_ids"])


def test_a_full_context_is_reported(edgelm: Edgelm, model: Path) -> None:
    done = edgelm("run", model, "hello", "--ctx", "24", "--temperature", "0", "--json")
    result = json.loads(done.stdout)
    assert result["finish_reason"] == "context"
    assert result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"] == 24
    assert b"the context of 24 tokens is full; raise --ctx" in done.stderr
    assert done.returncode == 0


def test_nothing_of_the_current_folder_is_run(
    edgelm: Edgelm, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    edgelm.command = [str(Path(sys.executable).with_name("edgelm"))]  # `python -m` searches the current folder
    assert edgelm.process("run", model, "hello", "--max-tokens", "3").returncode == 0


def test_a_file_name_that_is_not_utf_8_is_loaded(edgelm: Edgelm, model: Path, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/m\xff.gguf"
    try:
        Path(os.fsdecode(path)).write_bytes(model.read_bytes())
    except OSError:
        pytest.skip("this file system has no such names")
    done = edgelm.process("run", os.fsdecode(path), "hello", "--json", "--max-tokens", "3")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("redirect", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_traceback(edgelm: Edgelm, model: Path, redirect: str) -> None:
    command = f'exec "$0" -m edgelm run "$1" hello --max-tokens 3 {redirect}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, str(model)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_S,
        env=edgelm.environment,
        check=False,
    )
    assert done.returncode == 0
    assert NOTE.fullmatch(done.stderr)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize("arguments", [("run", "MODEL", "hello"), ("config",), ("--version",)])
def test_a_full_disk_under_standard_output_is_one_line(edgelm: Edgelm, model: Path, arguments: tuple[str, ...]) -> None:
    words = [str(model) if word == "MODEL" else word for word in arguments]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*edgelm.command, *words],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            env=edgelm.environment,
            check=False,
        )
    assert done.returncode == 1
    assert re.fullmatch(rb"error: [^\n]*written[^\n]*\n", done.stderr)


def test_an_output_that_is_not_utf_8_fails_no_answer(edgelm: Edgelm, model: Path) -> None:
    done = edgelm.process("run", model, "hello", "--max-tokens", "60", *WILD, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert NOTE.fullmatch(done.stderr)


# -- bad input -----------------------------------------------------------------------------------------------------


def test_bad_files(edgelm: Edgelm, model: Path, tmp_path: Path) -> None:
    def with_bytes(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    whole = model.read_bytes()
    lying = bytearray(whole)
    lying[8:16] = (2**60).to_bytes(8, "little")  # the number of tensors
    cases = {
        tmp_path / "missing.gguf": "missing.gguf does not exist",
        tmp_path: "is a folder",
        with_bytes("empty.gguf", b""): "empty",
        with_bytes("text.gguf", b"What is the weather like today? " * 9): "not a GGUF",
        with_bytes("cut.gguf", whole[: len(whole) * 2 // 3]): "cut short",
        with_bytes("lying.gguf", bytes(lying)): "lying.gguf",
        write_tiny(tmp_path / "vocab.gguf", vocab_only=True): "only a vocabulary",
    }
    for path, expected in cases.items():
        assert expected in error_of(edgelm("run", path, "hi")), path


def test_version_1_is_refused(edgelm: Edgelm, model: Path, tmp_path: Path) -> None:
    data = model.read_bytes()
    (tmp_path / "old.gguf").write_bytes(data[:4] + (1).to_bytes(4, "little") + data[8:])
    assert "version 1" in error_of(edgelm("run", tmp_path / "old.gguf", "hi"))


def test_an_unknown_architecture_is_named(edgelm: Edgelm, model: Path, tmp_path: Path) -> None:
    data = model.read_bytes().replace(b"llama", b"lloma")
    (tmp_path / "odd.gguf").write_bytes(data)
    assert "lloma" in error_of(edgelm("run", tmp_path / "odd.gguf", "hi"))


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(edgelm: Edgelm, model: Path) -> None:
    message = error_of(edgelm("run", model, "--ctx", "64", stdin=b"hello " * 900))
    assert re.search(r"the prompt has [\d,]+ tokens, the context holds 64", message)


def test_an_open_pipe_beside_a_prompt_is_waited_for_with_a_line(edgelm: Edgelm, model: Path) -> None:
    command = [*edgelm.command, "run", str(model), "hello", "--max-tokens", "2"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=edgelm.environment, **pipes) as process:  # type: ignore[call-overload]
        line = process.stderr.readline().decode()
        assert line == "note: waiting for standard input, an open pipe; < /dev/null or --no-stdin reads none\n"
        process.communicate(b"world", timeout=TIMEOUT_S)
        assert process.returncode == 0
    with subprocess.Popen([*command, "--no-stdin"], env=edgelm.environment, **pipes) as process:  # type: ignore[call-overload]
        assert process.wait(TIMEOUT_S) == 0, "the pipe is still open"
        assert b"waiting" not in process.stderr.read()
        process.stdin.close()


def test_a_loop_keeps_its_list(edgelm: Edgelm, model: Path) -> None:
    loop = 'while read -r line; do "$@" "$line" --no-stdin > /dev/null 2>&1 && echo "done $line"; done'
    command = ["sh", "-c", loop, "sh", *edgelm.command, "run", str(model), "--max-tokens", "1"]
    done = subprocess.run(command, input=b"one\ntwo\n", env=edgelm.environment, stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"done one\ndone two\n"


def test_a_prompt_like_a_flag_is_told_to_stand_behind_dashes(edgelm: Edgelm, model: Path) -> None:
    message = error_of(edgelm("run", model, "-5 + 3"), 2)
    assert message.endswith("; a text that begins with - stands behind --: -- '-5 + 3'")
    assert edgelm("run", model, "--max-tokens", "1", "--", "-5 + 3").returncode == 0
    assert error_of(edgelm("run", model, "hi", "--nosuch"), 2).endswith("; see --help")


@pytest.mark.parametrize("command", [("help",), ("run", "--help"), ("list",)])
def test_a_reader_that_leaves_is_no_failure(edgelm: Edgelm, command: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*edgelm.command, *command], stdout=write, stderr=subprocess.PIPE, env=edgelm.environment, check=False
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_impossible_request_is_one_line(edgelm: Edgelm, model: Path) -> None:
    for arguments, expected in {("run", model, ""): "empty", ("run", model, "hi", "--ctx", "4096"): "512"}.items():
        assert expected in error_of(edgelm(*arguments)), arguments
    assert "0xff at 2" in error_of(edgelm("run", model, stdin=b"ab\xffcd"))


def test_an_invalid_value_of_a_flag_is_wrong_usage(edgelm: Edgelm, model: Path) -> None:
    for arguments, expected in {
        ("run", model, "hi", "--top-p", "7"): b"--top-p: top_p is '7'; give ",
        ("run", model, "hi", "--kv", "q1"): b"--kv: kv is 'q1'; give one of ",
        ("run", model, "hi", "--temperature", "nan"): b"--temperature: temperature is 'nan'; give ",
        ("serve", "--port", "0", "--parallel", "0"): b"--parallel: parallel is '0'; give ",
    }.items():
        done = edgelm(*arguments)
        assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done
        assert done.stderr.startswith(b"error: " + expected), done


def test_more_memory_than_there_is(edgelm: Edgelm, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "wide.gguf", context=2**22, layers=32, kv_heads=4, head_dim=256)
    assert re.search(r"needs [\d.]+ GiB .* are free", error_of(edgelm("run", path, "hi", "--ctx", str(2**22))))


def test_logits_that_are_not_numbers(edgelm: Edgelm, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "nan.gguf", nan_logits=True)
    assert "not numbers" in error_of(edgelm("run", path, "hello"))


def test_bad_settings_name_their_source(edgelm: Edgelm, model: Path) -> None:
    config = Path(edgelm.environment["EDGELM_CONFIG_DIR"])
    config.mkdir(exist_ok=True)
    file = config / "config.toml"
    try:
        cases = {"ctx = 'much'": "ctx", "wings = 2": "no setting wings", "ctx = ": "not valid TOML"}
        for text, expected in cases.items():
            file.write_text(text)
            message = error_of(edgelm("run", model, "hi"), USAGE_EXIT_CODE)
            assert expected in message
            assert str(file) in message
    finally:
        file.unlink()
    assert "EDGELM_CTX" in error_of(edgelm("run", model, "hi", EDGELM_CTX="-1"), USAGE_EXIT_CODE)


# -- interrupts and deaths -----------------------------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    """Return all descendants of a process; Linux and macOS."""
    out = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in out.splitlines()]
    direct = [child for child, parent in pairs if parent == pid]
    return direct + [other for child in direct for other in children_of(child)]


def engine_of(process: subprocess.Popen[bytes]) -> int:
    """Wait until the worker of the command writes; return its process id."""
    assert process.stdout
    assert process.stdout.read(1)
    (child,) = children_of(process.pid)
    return child


def gone(pid: int) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "endless.gguf", context=200_000, layers=12, width=256, ffn=1024, endless=True)


def test_ctrl_c_while_it_writes_ends_everything(edgelm: Edgelm, endless: Path) -> None:
    with edgelm.start("run", endless, "hello", "--ctx", "100000", "--temperature", "0") as process:
        child = engine_of(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130
        assert errors == b""
        assert gone(child)


# Writes a byte when the program begins to load its commands. Before that, Python itself answers Ctrl-C.
LOADING = """
import os, sys
sys.addaudithook(lambda event, of: event == "import" and of[0] == "edgelm.commands.cli" and os.write(1, b"!"))
from edgelm.base.errors import USAGE_EXIT_CODE
from edgelm.__main__ import main
main()
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3, 0.6, 1.2])
def test_ctrl_c_at_any_moment(edgelm: Edgelm, endless: Path, delay_s: float) -> None:
    edgelm.command = [sys.executable, "-c", LOADING]
    with edgelm.start("run", endless, "hello", "--ctx", "100000", "--temperature", "0") as process:
        assert process.stdout
        assert process.stdout.read(1) == b"!"
        time.sleep(delay_s)
        below = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130
        if b"Exception ignored" not in errors:  # Python prints so where a callback of an import is interrupted
            assert b"Traceback" not in errors
        assert all(gone(child) for child in below)


# Its only command sends a signal to itself.
HANGING_UP = """
import os, signal, sys, types
signal.signal(signal.SIGHUP, signal.%s)
hang_up = lambda: os.kill(os.getpid(), signal.SIGHUP)
sys.modules["edgelm.commands.cli"] = types.SimpleNamespace(run_cli=hang_up)
from edgelm.__main__ import main
main()
"""


@pytest.mark.parametrize(("inherited", "code"), [("SIG_DFL", 129), ("SIG_IGN", 0)])
def test_a_closed_terminal_ends_it_unless_nohup_says_otherwise(inherited: str, code: int) -> None:
    command = [sys.executable, "-c", HANGING_UP % inherited]
    assert subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode == code


def test_a_killed_engine_is_one_clear_line(edgelm: Edgelm, endless: Path) -> None:
    for number, expected in ((signal.SIGKILL, "memory may have run out"), (signal.SIGSEGV, "SIGSEGV")):
        with edgelm.start("run", endless, "hello", "--ctx", "100000", "--temperature", "0") as process:
            os.kill(engine_of(process), number)
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 1
            assert errors.count(b"\n") == 1
            assert errors.startswith(b"error: the engine process was killed by ")
            assert expected in errors.decode()


def test_a_killed_command_leaves_no_engine_behind(edgelm: Edgelm, endless: Path) -> None:
    with edgelm.start("run", endless, "hello", "--ctx", "100000", "--temperature", "0") as process:
        child = engine_of(process)
        process.kill()
        assert gone(child)


def test_a_reader_that_leaves_is_no_error(edgelm: Edgelm, endless: Path) -> None:
    with edgelm.start("run", endless, "hello", "--ctx", "100000", "--temperature", "0") as process:
        child = engine_of(process)
        assert process.stdout
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 0
        assert gone(child)


def test_a_model_cannot_move_the_cursor_of_a_terminal(edgelm: Edgelm, model: Path) -> None:
    parent, child = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "edgelm", "run", model, "hello", "--max-tokens", "300", *WILD],
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=subprocess.PIPE,
        env=edgelm.environment,
    ) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                more = os.read(parent, 4096)
            except OSError:
                break
            if not more:
                break
            shown += more
        assert process.wait(TIMEOUT_S) == 0
    os.close(parent)
    assert not set(shown) & (set(range(32)) - {9, 10, 13})


def test_a_terminated_command_leaves_nothing_in_the_temporary_folder(
    edgelm: Edgelm, model: Path, tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    edgelm.environment = edgelm.environment | {"EDGELM_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(temporary)}
    with edgelm.start("run", model, "hello") as process:  # the first use measures the machine
        deadline = time.monotonic() + TIMEOUT_S
        while not list(temporary.glob("edgelm-canary-*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.terminate()
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert not list(temporary.iterdir())


def test_ctrl_c_on_a_terminal_ends_the_line_of_the_answer(edgelm: Edgelm, endless: Path) -> None:
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*edgelm.command, "run", endless, "hello", "--ctx", "100000", *WILD],
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=subprocess.DEVNULL,
        env=edgelm.environment,
    )
    os.close(child)
    shown, is_interrupted = b"", False
    try:
        while more := os.read(parent, 4096):
            shown += more
            if not is_interrupted and len(shown) > 20:
                process.send_signal(signal.SIGINT)
                is_interrupted = True
    except OSError:  # the end of a terminal
        pass
    os.close(parent)
    assert process.wait(TIMEOUT_S) == 130
    assert shown.endswith(b"\n"), shown[-80:]
