"""The worker protocol: messages on the wire, workers that behave badly, and a parent that waits in threads or tasks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError, EngineError, ModelError, RequestError
from edgelm.base.workers import parent
from edgelm.base.workers.messages import EvalJob, EvalSide, Loading, Ready, Result, RunJob, Text
from edgelm.base.workers.parent import Worker, WorkerDiedError, ask, in_daemon_thread
from edgelm.base.workers.wire import Failed, decode, encode

LIMIT_S = 30.0
PRELUDE = """
import os, signal, sys, time
from edgelm.base.errors import *
from edgelm.base.workers.child import *
from edgelm.base.workers.messages import *
from edgelm.base.workers.wire import *
"""
REPLIES = (Loading, Ready, Result, Text)
ECHO = "answer_requests({Text: lambda request, child: child.send(Text(request.text * 2))})"


def worker(program: str, **options: Any) -> Worker:
    """Start a Python program as a worker. Its grace is long: a busy machine is not a failure."""
    options = {"grace_s": LIMIT_S} | options
    return Worker("", replies=REPLIES, command=(sys.executable, "-c", PRELUDE + program), **options)


@dataclass(frozen=True, slots=True)
class Nested:
    paths: tuple[Path, ...]
    side: EvalSide | None
    numbers: list[float]


paths = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).map(Path)
sides = st.builds(EvalSide, paths, st.text())
settings = st.builds(Settings, ctx=st.none() | st.integers(1, 9), model_dirs=st.lists(st.text()).map(tuple))
messages = [
    st.builds(Text, st.text(st.characters(codec="utf-8"))),
    st.builds(Ready, st.text(), st.text(), st.text(), st.integers(0, 2**40), st.none() | st.integers(1, 65535)),
    st.builds(Nested, st.lists(paths).map(tuple), st.none() | sides, st.lists(st.floats(allow_nan=False))),
    st.builds(
        RunJob,
        model=paths,
        settings=settings,
        prompt=st.text(),
        stop=st.lists(st.text()).map(tuple),
        prefixes=st.none() | paths,
    ),
    st.builds(
        EvalJob,
        model=paths,
        settings=settings,
        text=paths,
        kv=st.text(),
        against=st.none() | sides,
        state=st.none() | st.dictionaries(st.text(), st.integers()),
    ),
]


@given(st.one_of(messages))
def test_a_message_comes_back_as_it_was_sent(message: object) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line, (Text, Ready, Nested, RunJob, EvalJob)) == message


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'"text"', b"{}", b'{"event": "other"}', b'{"text": "x"}', b"\xff"])
def test_other_lines_are_no_messages(line: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode(line, (Text,))


def test_a_reader_ignores_fields_that_it_does_not_have() -> None:
    assert decode(b'{"event": "text", "text": "x", "new": 1}', (Text,)) == Text("x")


def test_errors_keep_their_kind() -> None:
    failed = decode(encode(Failed.of(ModelError("it is damaged", "pull it again"))), (Failed,))
    error = failed.error((RequestError, ModelError))
    assert type(error) is ModelError
    assert (error.message, error.hint) == ("it is damaged", "pull it again")
    assert type(failed.error()) is EdgeLMError


def test_requests_are_answered_in_order() -> None:
    with worker(ECHO) as echo:
        for text in ("a", "b", "\u2028 日本", "x" * 300_000):
            echo.send(Text(text))
        assert [echo.receive(LIMIT_S).text for _ in range(4)] == ["aa", "bb", "\u2028 日本" * 2, "x" * 600_000]
    assert echo.exited
    assert echo.exit().code == 1


def test_what_a_worker_prints_is_its_log_and_no_reply(capfd: pytest.CaptureFixture[str]) -> None:
    program = "def do(request, child):\n print('noise')\n os.write(1, b'native noise\\n')\n child.send(Text('x'))\n"
    assert ask(worker(program + "run_job({Text: do})", echo="log: "), Text(""), LIMIT_S) == Text("x")
    assert {"log: noise", "log: native noise"} <= set(capfd.readouterr().err.splitlines())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ('os.write(1, b\'{"event": "tex\'); os.kill(os.getpid(), signal.SIGKILL)', "killed by SIGKILL"),
        ("sys.stderr.write('first\\nlast line'); sys.exit(3)", "ended with code 3 (last line)"),
        ("os.abort()", "SIGABRT"),
        ("sys.stderr.write('x' * 300_000); sys.exit(3)", "ended with code 3"),
        ("os.kill(os.getpid(), 40 if sys.platform == 'linux' else 30)", "was killed by signal 40"),
    ],
)
def test_a_death_is_one_line(program: str, words: str) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        ask(worker("sys.stdin.readline()\n" + program), Text(""), LIMIT_S)
    if sys.platform == "linux" or "40" not in words:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("action", "kind", "words"),
    [
        ("raise ModelError('it is damaged', 'pull it again')", ModelError, "it is damaged; pull it again"),
        ("raise MemoryError", EdgeLMError, "memory ran out; lower --ctx, or take a smaller model"),
        ("1 / 0", EdgeLMError, "edgelm failed: ZeroDivisionError: division by zero; -v shows where"),
    ],
)
def test_an_error_is_raised_here_and_the_next_request_is_answered(action: str, kind: type, words: str) -> None:
    program = (
        f"def do(request, child):\n if request.text: {action}\n child.send(Text('fine'))\nanswer_requests({{Text: do}})"
    )
    with worker(program, errors=(ModelError,)) as failing:
        failing.send(Text("x"))
        with pytest.raises(kind) as caught:
            failing.receive(LIMIT_S)
        assert str(caught.value) == words
        failing.send(Text(""))
        assert failing.receive(LIMIT_S) == Text("fine")


def test_a_job_that_fails_has_an_exit_code() -> None:
    with worker("sys.exit(run_job({Text: lambda *_: 1 / 0}))") as failing:
        failing.send(Text(""))
        with pytest.raises(EdgeLMError):
            failing.receive(LIMIT_S)
        assert failing.exit().code == 1
        assert "ZeroDivisionError" in "\n".join(failing.exit().last_lines)
        assert failing.receive(LIMIT_S) is None


def test_a_worker_that_cannot_be_started_is_an_error() -> None:
    with pytest.raises(EngineError, match="a process cannot be started: No such file"):
        Worker("", replies=(), command=("/no/such/program",))


def test_a_reply_that_does_not_come_in_time() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        ask(worker("time.sleep(600)"), Text(""), 0.3)
    assert time.monotonic() - begun < LIMIT_S, "it is killed without grace"


def test_a_deaf_worker_is_killed_after_its_grace() -> None:
    deaf = worker("signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()", grace_s=0.2)
    deaf.close()
    assert deaf.exit().code == -signal.SIGKILL


def test_a_worker_that_closes_its_output_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "GRACE_S", 0.2)
    with worker("os.close(1); time.sleep(600)") as mute:
        assert mute.receive(LIMIT_S) is None
        assert mute.exit().code == -signal.SIGKILL


NESTED = b'{"event": "text", "text": ' + b"[" * 100_000 + b"\n"
unreadable = pytest.mark.parametrize(
    "line", [b"{\n", b"\xff\n", b'{"event": "text"}\n', NESTED], ids=["half", "not UTF-8", "no text", "nested"]
)


@unreadable
def test_a_request_that_cannot_be_read_ends_the_worker(line: bytes) -> None:
    """Without the thread that reads requests, a worker would outlive its parent."""
    with worker(ECHO) as echo:
        echo.send_line(line)
        assert echo.receive(LIMIT_S) is None
        assert echo.exit().code == 2
        assert "a request cannot be read" in echo.exit().last_line


@unreadable
def test_a_reply_that_cannot_be_read_is_an_error_and_not_an_endless_wait(line: bytes) -> None:
    with worker(f"os.write(1, {line!r})\n{ECHO}") as echo:
        with pytest.raises(EdgeLMError, match="a worker's reply cannot be read"):
            echo.receive(LIMIT_S)
        echo.send(Text("x"))
        assert echo.receive(LIMIT_S) == Text("xx")


def test_closing_echoes_the_log_to_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    program = "def do(request, child):\n child.at_end(lambda: print('line\\n' * 10_000 + 'the end', flush=True))\n"
    with worker(program + " child.send(Text(''))\n time.sleep(600)\nrun_job({Text: do})", echo="") as logging:
        logging.send(Text(""))
        logging.receive(LIMIT_S)
    assert capfd.readouterr().err.count("\n") == 10_001


def test_a_log_is_kept_if_standard_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open("w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
    with worker("sys.exit('a\\nb')", echo="") as logging:
        assert logging.exit().last_lines == ("a", "b")


def test_a_grandchild_that_keeps_the_pipes_delays_the_news_by_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "GRACE_S", 0.2)
    with worker("if os.fork(): os._exit(7)\nsys.stdin.read(); time.sleep(5)") as forked:
        assert forked.exit().code == 7


def test_actions_at_the_end_run_when_the_parent_leaves(tmp_path: Path) -> None:
    program = """
def do(request, child):
    child.at_end(lambda: open(request.text, 'w').close())
    child.send(Text(''))
    time.sleep(600)
"""
    with worker(program + "run_job({Text: do})") as saving:
        saving.send(Text(str(tmp_path / "saved")))
        saving.receive(LIMIT_S)
    assert (tmp_path / "saved").exists()
    assert saving.exit().code == 1


def test_actions_at_the_end_run_also_if_a_reply_finds_no_reader_first(tmp_path: Path) -> None:
    program = """
def do(request, child):
    child.at_end(lambda: open(request.text, 'w').close())
    while True:
        child.send(Text(''))
run_job({Text: do})
"""
    command = [sys.executable, "-c", PRELUDE + program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(encode(Text(str(tmp_path / "saved"))))
        process.stdin.flush()
        process.stdout.readline()
        process.stdout.close()
        time.sleep(0.1)  # until a reply has failed
    assert (tmp_path / "saved").exists()


def test_an_action_at_the_end_that_hangs_is_cut_off() -> None:
    program = (
        "def do(request, child):\n child.at_end(lambda: time.sleep(600))\n child.send(Text(''))\n time.sleep(600)\n"
    )
    with worker(program + "run_job({Text: do})", grace_s=parent.GRACE_S) as hanging:
        hanging.send(Text(""))
        hanging.receive(LIMIT_S)
        begun = time.monotonic()
    assert time.monotonic() - begun < LIMIT_S
    assert hanging.exit().code in (1, -signal.SIGKILL)


# A worker that saves at its end, with progress every 0.02 s; `request.text` is a file that shows the end of it.
SAVES = """
import threading
from edgelm.base.workers import child as module
def save(child, path):
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        child.saving(2)
        time.sleep(0.02)
    open(path, 'w').close()
def do(request, child):
    child.at_end(lambda: save(child, request.text))
    child.send(Text(''))
    threading.Event().wait()
"""


def saving_worker(tmp_path: Path, seconds: float, setup: str = "", **options: Any) -> Worker:
    program = f"SECONDS = {seconds}\n{SAVES}{setup}\nrun_job({{Text: do}})"
    saving = worker(program, **options)
    saving.send(Text(str(tmp_path / "saved")))
    assert saving.receive(LIMIT_S) == Text("")
    return saving


def test_a_worker_that_saves_gets_the_time_for_it(tmp_path: Path) -> None:
    reports: list[int] = []
    saving = saving_worker(tmp_path, 3.0, "module.ENDING_S = 1.5", grace_s=1.7, on_saving=reports.append)
    assert saving.num_saving == 0
    saving.close()
    assert (tmp_path / "saved").exists()
    assert set(reports) == {2} == {saving.num_saving}
    assert saving.exit().code == 1


def test_progress_without_end_is_cut_off_by_the_worker_itself(tmp_path: Path) -> None:
    with saving_worker(tmp_path, 600.0, "module.SAVING_S = 0.3") as endless:
        begun = time.monotonic()
    assert time.monotonic() - begun < LIMIT_S
    assert endless.exit().code == 1
    assert not (tmp_path / "saved").exists()


def test_progress_without_end_is_cut_off_by_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "SAVING_S", 0.3)
    with saving_worker(tmp_path, 600.0, grace_s=0.3) as endless:
        pass
    assert endless.exit().code == -signal.SIGKILL


def test_saving_without_progress_is_cut_off_as_any_other_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "SAVING_S", 10 * LIMIT_S)
    setup = "module.SAVING_S = 600\ndef save(child, path):\n child.saving(2)\n time.sleep(600)"
    with saving_worker(tmp_path, 0.0, setup) as stuck:
        begun = time.monotonic()
    assert time.monotonic() - begun < LIMIT_S
    assert stuck.exit().code in (1, -signal.SIGKILL)


def test_ctrl_c_ends_a_worker_that_saves_at_once(tmp_path: Path) -> None:
    saving = saving_worker(tmp_path, 600.0)
    main = threading.get_ident()
    interrupt = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        saving.close()
    interrupt.join()
    assert saving.exit().code == -signal.SIGKILL


def test_a_worker_whose_parent_was_killed_saves_for_the_next_one(tmp_path: Path) -> None:
    program = f"""{PRELUDE}
from edgelm.base.workers.parent import Worker
program = "SECONDS = 1.0\\n" + {PRELUDE + SAVES!r} + "\\nrun_job({{Text: do}})"
child = Worker("", replies=(Text,), command=(sys.executable, "-c", program))
child.send(Text({str(tmp_path / "saved")!r}))
child.receive()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], timeout=LIMIT_S, check=False)
    deadline = time.monotonic() + LIMIT_S
    while not (tmp_path / "saved").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_does_not_outlive_a_parent_that_is_killed() -> None:
    program = f"""{PRELUDE}
from edgelm.base.workers.parent import Worker
child = Worker("", replies=(Text,), command=(sys.executable, "-c", {PRELUDE + ECHO!r}))
child.send(Text("x"))
child.receive()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    pid = int(done.stdout)
    deadline = time.monotonic() + LIMIT_S
    while _is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_environment_is_set_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELM_A", "ours")
    program = "run_job({Text: lambda request, child: child.send(Text(repr(os.environ.get(request.text))))})"
    environment = {"EDGELM_A": None, "EDGELM_B": "set"}
    assert ask(worker(program, environment=environment), Text("EDGELM_A"), LIMIT_S) == Text("None")
    assert ask(worker(program, environment=environment), Text("EDGELM_B"), LIMIT_S) == Text("'set'")


async def test_tasks_wait_without_blocking_each_other() -> None:
    async with asyncio.timeout(LIMIT_S):
        workers = [worker(f"time.sleep({0.3 - 0.1 * i})\n{ECHO}") for i in range(3)]
        for number, each in enumerate(workers):
            each.send(Text(str(number)))
        order: list[str] = []

        async def wait(one: Worker) -> None:
            order.append((await one.areceive()).text)

        await asyncio.gather(*map(wait, workers))
        assert sorted(order) == ["00", "11", "22"]
        await asyncio.gather(*(one.aclose() for one in workers))
        assert [one.exited for one in workers] == [True] * 3
        assert [(await one.aexit()).code for one in workers] == [1] * 3


async def test_a_wait_can_be_cancelled_and_taken_up_again() -> None:
    async with asyncio.timeout(LIMIT_S):
        with worker(ECHO) as echo:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await echo.areceive()
            echo.send(Text("x"))
            assert await echo.areceive() == Text("xx")


async def test_a_worker_is_ended_if_the_wait_for_its_end_is_cancelled() -> None:
    deaf = worker("signal.pause()", grace_s=0.5)
    closing = asyncio.create_task(deaf.aclose())
    await asyncio.sleep(0.1)
    closing.cancel()
    async with asyncio.timeout(LIMIT_S):
        assert (await deaf.aexit()).code == -signal.SIGKILL


def test_commands_that_wait_in_threads_do_not_import_asyncio() -> None:
    """It would make `edgelm list` a tenth slower, in both of its processes."""
    program = "import sys, edgelm.commands.list, edgelm.jobs.reader; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=LIMIT_S, check=False).returncode == 0


@pytest.mark.parametrize(
    ("modules", "unused"),
    [
        ("edgelm.engine.sampling.grammar_worker", "numpy edgelm.engine.sampling.stronger"),
        (
            "edgelm.commands.run",
            "edgelm.checkpoints edgelm.chats.attached_files edgelm.chats.presets edgelm.base.workers.pictures",
        ),
        (
            "edgelm.jobs.worker, edgelm.backends.llama.build",
            (
                "edgelm.making.conversion.convert edgelm.models edgelm.evaluation edgelm.jobs.embed "
                "edgelm.text.constraint edgelm.text.calls.derive edgelm.checkpoints.safetensors "
                "edgelm.backends.torch.memory"
            ),
        ),
        (
            "edgelm.commands.chat, edgelm.tui.app",  # up to its first paint
            "tomlkit openai edgelm.chats.knowledge.index edgelm.base.workers.messages",
        ),
    ],
)
def test_an_answer_and_the_chat_import_only_what_they_need(modules: str, unused: str) -> None:
    """`edgelm run` starts four processes: what each imports is most of its processor time."""
    program = f"import sys, {modules}; print(*sorted(set({unused!r}.split()) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.strip() == ""


def test_a_loop_that_is_closed_meanwhile_does_no_harm() -> None:
    with worker(ECHO) as echo:

        async def leave() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await echo.areceive()

        asyncio.run(leave())
        echo.send(Text("x"))
        assert echo.receive(LIMIT_S) == Text("xx")


async def test_work_in_a_daemon_thread_gives_its_result_or_its_error() -> None:
    def fail() -> None:
        raise ModelError("damaged")

    assert await in_daemon_thread(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ModelError):
        await in_daemon_thread(fail)


def test_json_lines_are_documented_by_their_names() -> None:
    assert json.loads(encode(Loading(0.5))) == {"event": "loading", "share": 0.5}
    assert os.linesep not in encode(Text("a\nb")).decode().rstrip()
