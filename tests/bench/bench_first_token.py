"""Where the time to the first token goes: ms of each hop of a one-token chat completion, medians.

    python -m tests.bench.bench_first_token MODEL [--rounds 40] [--words 20]

Three doors alternate, each with new random words, so that nothing is cached: `edgelm serve`; an engine process's routes
on a Unix socket, in this process; and the preparation of the request alone (template worker, tokenizer). A hop is the
difference of two of them; `engine` is what the engine says of itself: its queue and the step of the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from edgelm.backends.build import build
from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.workers.messages import EngineJob
from edgelm.engine.sampling.grammar import GrammarCompiler
from edgelm.jobs.answer import Answerer
from edgelm.jobs.request import AnswerRequest
from edgelm.server.engine_process.app import EngineParts, engine_app
from edgelm.server.listener import Server, bind_unix
from edgelm.text.template_runner import TemplateRunner
from tests.server.harness import serving

WARM_UP = 5
SETTINGS = Settings(spec="off")
WORDS = "the a dog model answer code list of in and to write story table name price number day red blue once".split()


def body(model: str, words: int) -> dict[str, Any]:
    text = " ".join(random.choices(WORDS, k=words))
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}


async def measure(model: Path, rounds: int, words: int, front: httpx2.AsyncClient, loaded: LoadedModel) -> None:
    templates = TemplateRunner(loaded.tokenizer, loaded.prompt_tokens)
    grammars = GrammarCompiler(loaded.tokenizer, loaded.engine.info.num_vocab)
    answerer = Answerer(loaded, templates, grammars, SETTINGS)
    times: dict[str, list[float]] = {"front": [], "process": [], "prepare": [], "engine": []}
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "engine.sock")
        server = Server(engine_app(EngineParts(loaded, answerer), "key"))
        serving_task = asyncio.create_task(server.serve(sockets=[bind_unix(socket)]))
        transport = httpx2.AsyncHTTPTransport(uds=str(socket))
        headers = {"authorization": "Bearer key"}
        async with httpx2.AsyncClient(base_url="http://edgelm", transport=transport, headers=headers) as direct:

            async def post(client: httpx2.AsyncClient) -> dict[str, Any]:
                reply = await client.post("/v1/chat/completions", json=body(model.stem, words), timeout=60)
                reply.raise_for_status()
                answer: dict[str, Any] = reply.json()
                return answer

            async def timed(name: str, work: Callable[[], Awaitable[Any]]) -> Any:
                began = time.perf_counter()
                result = await work()
                times[name].append(1000 * (time.perf_counter() - began))
                return result

            for turn in range(WARM_UP + rounds):
                if turn == WARM_UP:
                    for list_ in times.values():
                        list_.clear()
                await timed("front", lambda: post(front))
                answer = await timed("process", lambda: post(direct))
                times["engine"].append(answer["edgelm"]["timings"]["first_token_ms"])
                request = AnswerRequest(messages=body("", words)["messages"], sampling={"max_tokens": 1})
                await timed("prepare", lambda request=request: answerer.prepare(request))
        server.should_exit = True
        await serving_task
    await templates.close()
    await grammars.close()
    report(model, answer["usage"]["prompt_tokens"], times)


def report(model: Path, tokens: int, times: dict[str, list[float]]) -> None:
    front, process, prepare, engine = (statistics.median(times[name]) for name in times)
    load = os.getloadavg()[0]
    print(f"{model.name}, prompts of about {tokens} tokens, {len(times['front'])} rounds")
    print(
        f"{platform.processor() or platform.machine()}, {usable_cores().physical} cores, load {load:.1f} at the end\n"
    )
    rows = [
        ("client, front, and their connections", front - process),
        ("HTTP, parsing and reply of the engine process", process - prepare - engine),
        ("template worker, tokenizer, constraints", prepare),
        ("engine: queue, step of the prompt, sampling", engine),
        ("all", front),
        ("all but the engine", front - engine),
    ]
    for name, median_ms in rows:
        print(f"{name:48}{median_ms:8.2f} ms")
    for name, samples in times.items():
        print(f"{name}: {min(samples):.1f} to {max(samples):.1f} ms", end="; ")
    print()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--words", type=int, default=20)
    options = parser.parse_args()
    model: Path = options.model.resolve()
    with ThreadPoolExecutor(1) as loading:
        loaded = loading.submit(build, EngineJob(model=model, settings=SETTINGS)).result()
    try:
        with tempfile.TemporaryDirectory() as folder:
            places = {f"EDGELM_{kind}_DIR": str(Path(folder, kind)) for kind in ("CONFIG", "DATA", "RUNTIME")}
            environment = dict(os.environ) | places | {"EDGELM_SPEC": "off"}
            with serving(environment, model, log=Path(folder, "log")) as front:

                async def run() -> None:
                    async with httpx2.AsyncClient(base_url=front.address, trust_env=False) as client:
                        await measure(model, options.rounds, options.words, client, loaded)

                asyncio.run(run())
    finally:
        loaded.engine.close()


if __name__ == "__main__":
    main()
