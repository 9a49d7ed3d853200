"""Records what agents send, as fixtures of the same shape with synthetic text.

    python -m tests.agents.record --bin FOLDER [--bin FOLDER …] [AGENT …]

Each agent runs by `edgelm launch` against its scripted model (tests/clients/launched.py). Names, types, ids and schemas
are kept, and what the scripted model wrote; every other text is replaced by words, shortened to MAX_TEXT characters.
So a fixture holds no text of an agent, nothing of this machine, and is small. Needs a network namespace with loopback.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from edgelm.commands.launch.agents import AGENTS
from tests.clients import launched, recorder
from tests.clients.recorder import Exchange
from tests.clients.scripted import ANSWER, TALK, THOUGHT

FIXTURES = Path(__file__).parent / "fixtures"
MAX_TEXT = 12  # characters
WORDS = "the file is read and a command runs in this folder so that a user can see what was done".split()
NAME = re.compile(r"[\w./:@$<>|+-]{1,64}")  # of a tool, a type, a parameter, a model
SECRET = re.compile(r"[0-9a-f]{8,}|[0-9A-HJKMNP-TV-Z]{20,}|\d{9,}", re.IGNORECASE)  # of a session or a machine
FOLDER = re.compile(r"/tmp/edgelm-[^/\"\s]*")
BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*")
KEPT_KEYS = ("arguments", "encrypted_content", "signature", "thinking")  # written by the model


def synthetic(value: Any, key: str = "") -> Any:
    """Return a value of the same shape without its texts."""
    if isinstance(value, dict):
        return {FOLDER.sub("/home", name): synthetic(child, name) for name, child in value.items()}
    if isinstance(value, list):
        return [synthetic(child, key) for child in value]
    return _synthetic_text(value, key) if isinstance(value, str) else value


def _synthetic_text(text: str, key: str) -> str:
    text = FOLDER.sub("/home", text)
    if key in KEPT_KEYS or text.strip() in (ANSWER, THOUGHT.strip()):
        return text
    if key in ("id", "call_id", "tool_call_id", "tool_use_id", "item_id", "model"):
        return text
    if NAME.fullmatch(text) or (text.startswith("{") and key == "input"):
        return SECRET.sub(lambda match: "0" * len(match[0]), text)
    if BILLING.match(text):
        head, _, rest = text.partition("\n")
        return SECRET.sub("0", head) + ("\n" + _words(rest) if rest else "")
    return _words(text)


def _words(text: str) -> str:
    """Return words about as long as a text, within the limit."""
    length = min(len(text), MAX_TEXT)
    words = " ".join(WORDS * (1 + length // 60))[:length].strip()
    words = f"{TALK} {words}" if TALK in text else words  # the model's cue
    return words + "\n" if text.endswith("\n") else words


def record(name: str, programs: list[Path]) -> Path:
    """Run an agent, and write its fixture. Raises RuntimeError if the agent is not installed or refuses an answer."""
    requests: list[dict[str, Any]] = []
    note = recorder._exchange

    def keep(found: Exchange, body: bytes, sent: bytes) -> Exchange:
        exchange = note(found, body, sent)
        requests.append({"path": found.path, "body": synthetic(json.loads(body))})
        return exchange

    recorder._exchange = keep
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = list(launched.checked(name, programs, Path(folder)))
            transcript = (Path(folder) / f"{name}.txt").read_text().splitlines()[0] if requests else ""
    finally:
        recorder._exchange = note
    needed = [one for one in outcomes if one.check != "an answer is cut off"]  # on a slow machine, the agent gives up
    wrong = [f"{one.check}: {one.reason}" for one in needed if one.outcome != "passed"]
    if wrong or not requests:
        raise RuntimeError("; ".join(wrong) or "nothing was sent")
    script = launched.SCRIPTS[name]
    calls = [
        [call.name, launched._placed(call.arguments, Path("/home/project"))] for call in (script.first, script.second)
    ]
    client = transcript.partition(" by `")[0]
    path = FIXTURES / f"{name}.json"
    found = {"client": client, "calls": calls if script.num_tools else [], "requests": requests}
    write_fixture(path, found)
    return path


def write_fixture(path: Path, found: dict[str, Any]) -> None:
    """Write a fixture with a line for each request."""
    head = json.dumps({name: value for name, value in found.items() if name != "requests"})
    lines = ",\n".join(json.dumps(request, separators=(",", ":"), ensure_ascii=False) for request in found["requests"])
    path.write_text(f'{head[:-1]}, "requests": [\n{lines}\n]}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", help="some of the agents")
    parser.add_argument("--bin", type=Path, action="append", default=[], help="folder with the agents' programs")
    arguments = parser.parse_args()
    failed = 0
    FIXTURES.mkdir(exist_ok=True)
    for agent in AGENTS:
        if arguments.agents and agent.name not in arguments.agents:
            continue
        try:
            path = record(agent.name, arguments.bin)
            print(f"{agent.name}: {path.stat().st_size:,} bytes", flush=True)
        except RuntimeError as error:
            failed += 1
            print(f"{agent.name}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
