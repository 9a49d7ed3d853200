"""A GPU that fails under a real front and real engine processes: clients get one error, the next request an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import openai
import pytest

from edgelm.base.errors import DeviceError, GpuLoadError, ModelError
from edgelm.server.engines.process import REMEMBERED_S, GpuFailures
from tests.server.harness import ENDLESS, LIMIT_S, Front, body, serving, until
from tests.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]
PLAN = "gpu-plan.jsonl"  # as in failing_engine.py, whose import is that of torch
ILLEGAL = "CUDA error: an illegal memory access was encountered"
MORE_LINES = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call\nCompile with TORCH_USE_CUDA_DSA"
)
MODEL = Path("/m.gguf")

Fronts = Callable[..., AbstractContextManager[Front]]


@pytest.fixture
def fronts(own: dict[str, str], tmp_path: Path) -> Fronts:
    """Fronts whose engines fail one after the other as planned; their logs are checked for tracebacks."""

    @contextmanager
    def start(*plan: dict[str, object]) -> Iterator[Front]:
        write_tiny(tmp_path / "tiny.gguf", context=2048, quant="q8_0")
        (tmp_path / PLAN).write_text("\n".join(map(json.dumps, plan)))
        environment = own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        log = tmp_path / "log"
        with serving(environment, tmp_path / "tiny.gguf", "-v", log=log, module="tests.server.failing_front") as front:
            yield front
        assert "Traceback" not in log.read_text()

    return start


def test_an_illegal_access_ends_the_engine_and_the_second_one_the_use_of_cuda(fronts: Fronts) -> None:
    """The first is in the middle of a stream, the second before the first token of a request that is sent at once."""
    crash = {"step": ILLEGAL + MORE_LINES, "after": 6}
    with fronts(crash, crash) as front:
        events = list(front.events(max_tokens=1000, **ENDLESS))
        assert "choices" in events[0]
        assert [event for event in events if "error" in event] == events[-1:]
        assert events[-1]["error"]["code"] == "engine_died"
        assert events[-1]["error"]["message"] == (
            f"the GPU failed: {ILLEGAL}; try again; if it happens again, use --engine llama"
        )
        with openai.OpenAI(base_url=f"{front.address}/v1", api_key="any", timeout=LIMIT_S, max_retries=0) as client:
            with pytest.raises(openai.APIError, match="illegal memory access") as caught:
                for _ in client.chat.completions.create(
                    **body("tiny", "hello", max_tokens=1000), stream=True, extra_body=ENDLESS
                ):
                    pass
            assert caught.value.code == "engine_died"
            answer = client.chat.completions.create(**body("tiny", "hello", max_tokens=20), extra_body=ENDLESS)
            assert answer.usage.completion_tokens == 20
        state = front.ps("tiny")
        assert state["engine"] == "llama"
        problem = f"it failed 2 times within 10 minutes, last: the GPU failed: {ILLEGAL}"
        assert state["cuda_problem"] == problem
        assert front.log.read_text().count(f"tiny: CUDA is not used: {problem}\n") == 1


def test_a_step_that_hangs_ends_the_engine_and_what_cannot_be_loaded_again_is_llama_cpps(fronts: Fronts) -> None:
    with fronts({"hang": 8}, {"load": "CUDA error: out of memory" + MORE_LINES}) as front:
        events = list(front.events(max_tokens=1000, **ENDLESS))
        assert "choices" in events[0]
        assert [event for event in events if "error" in event] == events[-1:]
        assert "the GPU hangs: a step of 1 tokens did not end within 1 s" in events[-1]["error"]["message"]
        assert front.chat(max_tokens=5, **ENDLESS).json()["usage"]["completion_tokens"] == 5
        state = until("it is ready", lambda: (now := front.ps("tiny"))["state"] == "ready" and now)
        assert (state["engine"], state["cuda_problem"]) == ("llama", "the memory of the GPU is used up")
        assert state["error"] is None


def test_a_step_without_memory_fails_its_request_and_the_engine_goes_on(fronts: Fronts) -> None:
    with fronts({"step": "CUDA error: out of memory" + MORE_LINES, "after": 6, "until": 8}) as front:
        events = list(front.events(max_tokens=1000, **ENDLESS))
        assert "choices" in events[0]
        assert [event for event in events if "error" in event] == events[-1:]
        assert events[-1]["error"]["code"] == "out_of_memory"
        assert events[-1]["error"]["message"] == (
            "the memory of the GPU is used up; end other programs on it (nvidia-smi lists them), lower --ctx or "
            "--parallel, or choose a smaller --kv"
        )
        assert front.chat(max_tokens=5, **ENDLESS).json()["usage"]["completion_tokens"] == 5
        state = front.ps("tiny")
        assert (state["state"], state["engine"], state["cuda_problem"]) == ("ready", "torch", None)


def test_a_load_that_hangs_is_left_to_llama_cpp(fronts: Fronts) -> None:
    with fronts({"load_hangs": True}) as front:
        assert front.chat(max_tokens=5, **ENDLESS).json()["usage"]["completion_tokens"] == 5
        state = front.ps("tiny")
        assert state["engine"] == "llama"
        assert re.fullmatch(
            r"the GPU hangs: a piece of loading the model did not end within \d s", state["cuda_problem"]
        )


# -- the rule ----------------------------------------------------------------------------------------------------------


def test_two_crashes_within_minutes_are_one_too_many() -> None:
    now = 0.0
    failures = GpuFailures(lambda: now)
    failures.note(MODEL, DeviceError("the GPU failed: x"))
    now += REMEMBERED_S + 1
    failures.note(MODEL, DeviceError("the GPU failed: x"))
    assert failures.problem(MODEL) == ""
    now += 10
    failures.note(MODEL, DeviceError("the GPU failed: y"))
    assert failures.problem(MODEL) == "it failed 2 times within 10 minutes, last: the GPU failed: y"
    assert failures.problem(Path("/other.gguf")) == ""
    now += REMEMBERED_S
    assert failures.problem(MODEL) == ""


def test_a_failure_to_load_counts_at_once_and_other_errors_never() -> None:
    failures = GpuFailures()
    failures.note(MODEL, ModelError("damaged"))
    failures.note(MODEL, ModelError("damaged"))
    assert failures.problem(MODEL) == ""
    failures.note(MODEL, GpuLoadError("the memory of the GPU is used up"))
    assert failures.problem(MODEL) == "the memory of the GPU is used up"
