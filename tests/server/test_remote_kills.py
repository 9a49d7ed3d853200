"""Two servers of one model, of which one is killed again and again under 16 streams."""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2

from tests.counts import Count
from tests.server.fake_remote import config_of
from tests.server.fast_remote import counting
from tests.server.harness import LIMIT_S, serving, until

NUM_KILLS = Count(test=4, soak=40)
NUM_STREAMS, NUM_TOKENS = 16, 20
WHOLE = "".join(f"{number} " for number in range(NUM_TOKENS))


def test_answers_are_whole_or_say_that_they_are_not(environment: dict[str, str], tmp_path: Path) -> None:
    with counting(0.01) as steady, counting(0.01) as killed:
        endpoints = [f"http://127.0.0.1:{one.port}/v1" for one in (steady, killed)]
        (tmp_path / "config.toml").write_text(config_of({"counter": {"endpoint": endpoints}}))
        own = environment | {"EDGELM_CONFIG_DIR": str(tmp_path)}
        with serving(own, log=tmp_path / "log") as front:
            is_over = threading.Event()
            outcomes: Counter[str] = Counter()

            def ask_on() -> None:
                with httpx2.Client(base_url=front.address, timeout=LIMIT_S, trust_env=False) as http:
                    while not is_over.is_set():
                        outcomes[outcome_of(http)] += 1

            with ThreadPoolExecutor(NUM_STREAMS) as pool:
                asking = [pool.submit(ask_on) for _ in range(NUM_STREAMS)]
                try:
                    for _ in range(NUM_KILLS):
                        until("it is used", lambda: front.ps("counter")["remote"][1]["requests"])
                        killed.kill()
                        killed.start()
                finally:
                    is_over.set()
                for one in asking:
                    one.result()
            print(outcomes)
            assert outcomes["whole"] > 2 * NUM_KILLS
            assert set(outcomes) <= {"whole", "cut and said"}, "no failure before the first token reached a client"
            until("both are well", lambda: not any(box["problem"] for box in front.ps("counter")["remote"]))
            assert front.ps("counter")["requests"] == 0
        assert "Traceback" not in (tmp_path / "log").read_text()


def outcome_of(http: httpx2.Client) -> str:
    document = {"model": "counter", "messages": [{"role": "user", "content": "count"}], "stream": True}
    text = error = ""
    with http.stream("POST", "/v1/chat/completions", json=document | {"max_tokens": NUM_TOKENS}) as answer:
        if answer.status_code != 200:
            return f"status {answer.status_code}: {answer.read()!r}"
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                error = event.get("error", {}).get("message", error)
                text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    if error:
        is_right = text and WHOLE.startswith(text) and "counter runs at 127.0.0.1:" in error
        return "cut and said" if is_right else f"cut: {text!r}, {error}"
    return "whole" if text == WHOLE else f"wrong: {text!r}"
