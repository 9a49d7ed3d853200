#!/usr/bin/env python3
"""Asks the starter the 400 questions of this folder as the chat does, and counts the right answers.

    python packaging/starter_test/check.py [MODEL.gguf] [--wrong] [--free]

An answer about edgelm is right if it holds all facts of its question, an answer to a general question if it declines.
No answer may have a command, flag, key or setting that edgelm does not have. Exit code 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import httpx2 as httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from edgelm.base.errors import EdgeLMError
from edgelm.base.passages import Passage
from edgelm.chats.knowledge.index import Knowledge
from edgelm.chats.knowledge.quote import system_message
from edgelm.chats.knowledge.starter import UNKNOWN, starter_answers, starter_passages
from edgelm.tui.commands.table import COMMANDS
from tests import test_guide

HERE = Path(__file__).parent
PORT = 11933
LARGER = "qwen3:4b"
START_S = 60.0
LEAST_RIGHT, LEAST_DECLINED = 0.85, 0.95


class Server:
    """A server of this checkout with one model, in a folder of its own."""

    def __init__(self, model: str, home: Path, *flags: str) -> None:
        folders = {f"EDGELM_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "CACHE")}
        environment = {**os.environ, **folders, "XDG_RUNTIME_DIR": str(home), "HOME": str(home), "EDGELM_MEMORY": "0"}
        command = [sys.executable, "-m", "edgelm", "serve", model, "--port", str(PORT), *flags]
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60)
        self.model = str(Path(model).resolve()) if model.endswith(".gguf") else model

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                self._client.get("/v1/models")
                return self
            except httpx.TransportError:
                time.sleep(0.2)
        raise SystemExit("the server did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def answer(self, question: str, passages: list[Passage], **fields: object) -> tuple[str, dict[str, Any]]:
        """Return the text of an answer, and edgelm's own figures about it."""
        messages = [{"role": "system", "content": system_message(passages)}, {"role": "user", "content": question}]
        body = {"model": self.model, "messages": messages, "max_tokens": 900, "temperature": 0, **fields}
        response = self._client.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise SystemExit(response.text)
        reply = response.json()
        return reply["choices"][0]["message"]["content"], reply["edgelm"]


def invented(answer: str) -> list[str]:
    """Return the flags, commands and keys in an answer that edgelm does not have."""
    unknown = [flag for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", answer) if flag not in KNOWN_FLAGS]
    for span in test_guide.spans(answer):
        if re.fullmatch(r"/[a-z]+", span.split()[0]) and span.split()[0][1:] not in KNOWN_COMMANDS:
            unknown.append(span)
        if re.fullmatch(r"(Ctrl|Shift|Alt)\+\w+|F\d+|Esc|Del", span) and span not in KNOWN_KEYS:
            unknown.append(span)
    for line in test_guide.command_lines(answer):
        try:
            test_guide.require_valid(line)
        except (AssertionError, EdgeLMError, ValueError) as error:
            unknown.append(f"{line}: {error}")
    return unknown


KNOWN_FLAGS = test_guide.EVERY_FLAG | test_guide.OTHERS_FLAGS
GUIDE_TEXT = "\n".join(text for _, text in test_guide.guide.pages())
KNOWN_COMMANDS = (
    {command.name for command in COMMANDS}
    | {  # and routes of the server
        match[1:] for match in re.findall(r"(?<=`)/[a-z]+", GUIDE_TEXT)
    }
)
KNOWN_KEYS = {span for span in test_guide.spans(GUIDE_TEXT) if "+" in span or len(span) <= 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="starter")
    parser.add_argument("--wrong", action="store_true", help="show every answer that is wrong")
    parser.add_argument("--free", action="store_true", help="without the grammar of the chat, as a program asks")
    args = parser.parse_args()
    asked = [json.loads(line) for line in (HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    general = (HERE / "general.txt").read_text(encoding="utf-8").splitlines()
    num_right = num_found = num_declined = 0
    inventions: list[str] = []
    with tempfile.TemporaryDirectory() as home, Server(args.model, Path(home)) as server:
        knowledge = Knowledge(Path(home) / "knowledge.db")

        def ask(question: str) -> tuple[str, list[Passage]]:
            passages = starter_passages(knowledge, question, LARGER)
            allowed = {} if args.free else {"structured_outputs": {"choice": starter_answers(passages)}}
            text, _ = server.answer(question, passages, **allowed)
            inventions.extend(f"{question} -> {name}" for name in invented(text))
            return text, passages

        for entry in asked:
            text, passages = ask(entry["question"])
            right = holds(text, entry["facts"])
            num_right += right
            num_found += any(holds(f"{p.name} {p.text}", entry["facts"]) for p in passages)
            if args.wrong and not right:
                print(f"Q {entry['question']}\n  {entry['facts']}\n  read {[p.name for p in passages]}\n  A {text}")
        for question in general:
            text, _ = ask(question)
            num_declined += text.startswith(UNKNOWN)
            if args.wrong and not text.startswith(UNKNOWN):
                print(f"Q {question}\n  A {text}")
        knowledge.close()
    print(f"about edgelm: {num_right} of {len(asked)} right; the passage was found for {num_found}")
    print(f"general: {num_declined} of {len(general)} declined")
    print(f"invented: {len(inventions)}", *inventions, sep="\n  ")
    if num_right < LEAST_RIGHT * len(asked) or num_declined < LEAST_DECLINED * len(general) or inventions:
        raise SystemExit(1)


def holds(text: str, facts: list[list[str]]) -> bool:
    """Tell whether a text has all facts, every one in any of its wordings."""
    joined = " ".join(text.split()).casefold()
    return all(any(" ".join(words.split()).casefold() in joined for words in fact) for fact in facts)


if __name__ == "__main__":
    main()
