"""`llm` as a client that a user has configured, in a home of its own. launched.py runs programs by `edgelm launch`.

The model calls one tool and then writes a sentence, so a program that ends well has read a streamed call, sent its
result back, and read a streamed text. Owns the configuration and the signs of success in the output.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.programs import run_program


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one check of a client."""

    check: str
    outcome: str  # passed, failed, skipped
    reason: str = ""


@dataclass(slots=True)
class Place:
    """Where a program runs, and the server that it asks."""

    folder: Path  # of this program alone
    venv: Path
    address: str
    model: str
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "output.log"
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "home").mkdir(parents=True)
        (self.folder / "project").mkdir()
        (self.folder / "project" / "README.md").write_text("hello\n")
        subprocess.run(["git", "init", "-q", "."], cwd=self.folder / "project", check=False)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        home = self.folder / "home"
        places = {"HOME": home, "LLM_USER_PATH": home / "llm"}
        places |= {f"XDG_{kind}_HOME": home / f".{kind.lower()}" for kind in ("CONFIG", "DATA", "CACHE", "STATE")}
        environment = {
            "PATH": os.environ["PATH"],
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
            "EDGELM_KEY": "any",
        }
        environment |= {name: str(path) for name, path in places.items()}
        done = run_program(command, self.folder / "project", environment)
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(done.args)}\n{done.stdout}\n{done.stderr}\nexit code {done.returncode}\n")
        return done


def llm(place: Place) -> Iterator[Outcome]:
    """`llm` with a model in extra-openai-models.yaml: text, a schema, a tool, a conversation."""
    settings = {
        "model_id": "local", "model_name": place.model, "api_base": f"{place.address}/v1", "supports_tools": True,
        "supports_schema": True, "can_stream": True,
    }  # fmt: skip
    folder = place.folder / "home" / "llm"
    folder.mkdir()
    (folder / "extra-openai-models.yaml").write_text(json.dumps([settings]))  # YAML reads JSON
    program = place.venv / "bin" / "llm"
    yield ended("prompt", place.run(program, "-m", "local", "hello"), lambda out: bool(out.strip()))
    yield ended("no stream", place.run(program, "-m", "local", "--no-stream", "hello"), lambda out: bool(out.strip()))
    yield ended("conversation", place.run(program, "-m", "local", "-c", "and then?"), lambda out: bool(out.strip()))
    schema = place.run(program, "-m", "local", "--schema", "name, age int", "invent a dog")
    yield ended("schema", schema, lambda out: set(json.loads(out)) == {"name", "age"})
    function = "def weather(city: str) -> str:\n    'Tells the weather'\n    return 'sunny in ' + city"
    tool = place.run(program, "-m", "local", "--functions", function, "--td", "the weather?")
    yield ended("tool", tool, lambda out: bool(out.strip()) and "sunny in" in tool.stderr)


def ended(check: str, done: subprocess.CompletedProcess[str], true: Callable[[str], bool]) -> Outcome:
    """Return that a program ended well, and that its output is as it should be."""
    try:
        good = done.returncode == 0 and true(done.stdout)
    except (ValueError, LookupError, TypeError) as error:
        return Outcome(check, "failed", f"{type(error).__name__}: {error}")
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return (
        Outcome(check, "passed")
        if good
        else Outcome(check, "failed", f"exit code {done.returncode}; {' '.join(last)}"[:300])
    )
