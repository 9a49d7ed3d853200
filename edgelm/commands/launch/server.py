"""The server for an agent: one that runs, or one that is started and ends when nothing uses it.

Owns finding and starting it, and loading the model in it. Knows nothing of agents.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from edgelm.base.errors import EdgeLMError, EngineError
from edgelm.base.places import Places
from edgelm.base.runtime import FrontRecord, find_fronts, is_alive

START_S = 60.0
STOP_S = 25.0  # the engines may save conversations for SAVING_S
WAKE_S = 20.0
ASK_S = 10.0
POLL_S = 0.05
WAIT_S = 1  # of one request that loads: then its progress is shown
NO_KEY = "none"  # agents refuse an empty key
LOCK = "launch.lock"
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
THIS_MACHINE = "127.0.0.1,localhost,::1"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready on a server."""

    front: FrontRecord
    model: str  # as requests name it
    context: int


def running_front(places: Places, library: str) -> FrontRecord | None:
    """Return a front of a library that answers and that does not end with a chat."""
    for front in find_fronts(places.runtime):
        if front.of != "chat" and front.serves(library) and _answers(front):
            return front
    return None


def awake_front(places: Places, library: str, service: str | None) -> FrontRecord | None:
    """Return a front as `running_front` does; if there is none, let systemd start the service at that address."""
    front = running_front(places, library)
    if front is not None or service is None:
        return front
    with suppress(httpx2.HTTPError, httpx2.InvalidURL):  # the first connection starts it
        httpx2.get(f"http://{service}/health", timeout=WAKE_S, trust_env=False)
    return running_front(places, library)


@contextmanager
def lone_start(places: Places) -> Iterator[None]:
    """Keep other launches from starting a front while the block runs. Raises OSError."""
    places.runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (places.runtime / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep requests to this machine from the user's proxy, which would see them and fail."""
    if not any(environment.get(name) or environment.get(name.upper()) for name in PROXIES):
        return {}
    given = environment.get("no_proxy") or environment.get("NO_PROXY")
    return dict.fromkeys(("NO_PROXY", "no_proxy"), f"{given},{THIS_MACHINE}" if given else THIS_MACHINE)


def start_front(places: Places, port: int, arguments: list[str]) -> FrontRecord:
    """Start `edgelm serve` on this machine; it ends when neither an agent nor a request uses it.

    It listens at `port` if that is free. Raises EngineError with the reason where it does not start, and OSError.
    """
    log = places.cache / "launch.log"
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [sys.executable, "-P", "-m", "edgelm", "serve", "--until-unused", "--host", "127.0.0.1"]
    command += ["--port", str(port if _is_free(port) else 0), *arguments]
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as output:
        # A session of its own: Ctrl-C in the agent does not reach it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    deadline = time.monotonic() + START_S
    try:
        while process.poll() is None:
            for front in find_fronts(places.runtime):
                if front.pid == process.pid and _answers(front):
                    return front
            if time.monotonic() > deadline:
                raise EngineError("the server does not start", f"see {log}")
            time.sleep(POLL_S)
    except BaseException:  # Ctrl-C too
        process.terminate()
        process.wait()
        raise
    raise EngineError(f"the server does not start: {_reason(log)}", f"see {log}")


def end_front(front: FrontRecord) -> None:
    """End a front, and wait for its end."""
    deadline = time.monotonic() + STOP_S
    with suppress(ProcessLookupError):
        os.kill(front.pid, signal.SIGTERM)
    while is_alive(front.pid) and time.monotonic() < deadline:
        with suppress(ChildProcessError):
            os.waitpid(front.pid, os.WNOHANG)  # it may be a child of this process
        time.sleep(POLL_S)


def load(front: FrontRecord, model: str, path: Path, on_progress: Callable[[float | None], None]) -> Loaded:
    """Load a model, and return it when it is ready. `on_progress` gets shares of 1. Raises EdgeLMError."""
    _ask_to_load(front, model, on_progress)
    context = loaded_context(front, path)
    if context is None:  # it was unloaded meanwhile: an idle limit may be seconds
        _ask_to_load(front, model, on_progress)
        context = loaded_context(front, path)
    return Loaded(front, model, context or 0)


def _ask_to_load(front: FrontRecord, model: str, on_progress: Callable[[float | None], None]) -> None:
    with _client(front) as client:
        while True:
            response = _post(client, "/models/load", {"model": model})
            if response.status_code == httpx2.codes.OK:
                return
            error = _error(response)
            if response.status_code != httpx2.codes.SERVICE_UNAVAILABLE or error.get("code") != "model_loading":
                raise EngineError(str(error.get("message") or f"the server answers {response.status_code}"))
            on_progress(error.get("progress"))


def loaded_context(front: FrontRecord, path: Path) -> int | None:
    """Return the context of a model on a front; None: it is not loaded."""
    return next((entry["context"] for entry in loaded_models(front) if entry["path"] == str(path)), None)


def loaded_models(front: FrontRecord) -> list[dict[str, Any]]:
    """Return the entries of /edgelm/ps for models that are ready. Raises EdgeLMError."""
    try:
        with _client(front) as client:
            entries: list[dict[str, Any]] = client.get("/edgelm/ps").json()["models"]
    except (httpx2.HTTPError, ValueError, KeyError) as error:
        raise EngineError(f"the server at {front.address} does not answer: {error}") from None
    return [entry for entry in entries if entry["state"] == "ready"]


def _client(front: FrontRecord) -> httpx2.Client:
    return httpx2.Client(
        base_url=front.address, timeout=ASK_S, trust_env=False, headers=front.headers, verify=front.tls()
    )


def _post(client: httpx2.Client, path: str, body: dict[str, Any]) -> httpx2.Response:
    try:
        return client.post(path, json=body, headers={"prefer": f"wait={WAIT_S}"})
    except httpx2.HTTPError as error:
        raise EngineError(f"the server does not answer: {error}", "try again") from None


def _error(response: httpx2.Response) -> dict[str, Any]:
    """Return the error of an answer: its code and message, and the progress of a model that is being loaded."""
    try:
        body = response.json()
        return {**body["error"], "progress": body.get("progress")}
    except (ValueError, KeyError, TypeError):
        return {}


def _answers(front: FrontRecord) -> bool:
    try:
        with _client(front) as client:
            return client.get("/edgelm/ps").status_code == httpx2.codes.OK
    except (httpx2.HTTPError, EdgeLMError):
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _reason(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "it gave no reason"
