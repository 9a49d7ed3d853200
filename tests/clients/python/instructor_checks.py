"""instructor: typed answers by each way that it asks an OpenAI-compatible server for them, and its own retries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import instructor
from checks import ADDRESS, MODEL, PATIENCE_S, check, error_of, main
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, field_validator

USER: list[Any] = [{"role": "user", "content": "Hello there, what is the weather?"}]
# Without them, a small model may write one string over and over.
LIMITED: dict[str, Any] = {"temperature": 0, "max_tokens": 300, "extra_body": {"repetition_penalty": 1.1}}
FORCED = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)  # what the grammar ensures
MODES = (
    *FORCED,
    instructor.Mode.FUNCTIONS,
    instructor.Mode.PARALLEL_TOOLS,
    instructor.Mode.JSON,
    instructor.Mode.MD_JSON,
    instructor.Mode.RESPONSES_TOOLS,
    instructor.Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
)


class Weather(BaseModel):
    """A form of an answer."""

    city: str
    days: int
    sky: Literal["clear", "cloudy"]


class Refused(Weather):
    """A form that no answer has."""

    @field_validator("city")
    @classmethod
    def no_city(cls, city: str) -> str:
        raise ValueError(f"{city} is unknown")


def client(mode: instructor.Mode) -> instructor.Instructor:
    """Return instructor's client of our server."""
    openai = OpenAI(base_url=f"{ADDRESS}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S)
    return instructor.from_openai(openai, mode=mode)


def check_mode(mode: instructor.Mode) -> None:
    """Register a check: one typed answer, or one of many in the mode that takes any number of them."""

    def made() -> None:
        try:
            if mode == instructor.Mode.PARALLEL_TOOLS:
                answers = list(client(mode).create(Iterable[Weather], USER, model=MODEL, **LIMITED))  # type: ignore[type-abstract]
                assert len(answers) == 1, answers
            else:
                answers = [client(mode).create(Weather, USER, model=MODEL, **LIMITED)]
            assert isinstance(answers[0], Weather), answers
        except (IncompleteOutputException, InstructorRetryException) as error:
            answer = error.last_completion
            text = answer.choices[0].message.content if hasattr(answer, "choices") else str(answer)
            raise AssertionError(f"{type(error).__name__} for: {text}") from error

    made.__name__ = f"mode_{mode.name.lower()}"
    check(made)


for mode in MODES:
    check_mode(mode)


@check
def create_with_completion() -> None:
    made, completion = client(instructor.Mode.TOOLS).create_with_completion(USER, Weather, model=MODEL, **LIMITED)
    assert isinstance(made, Weather)
    assert completion.usage.completion_tokens > 0
    assert completion.choices[0].message.tool_calls


@check
def create_partial() -> None:
    for mode in FORCED:
        parts = list(client(mode).create_partial(Weather, USER, model=MODEL, **LIMITED))
        assert len(parts) > 1, mode
        assert Weather.model_validate(parts[-1].model_dump()), mode


@check
def a_wrong_answer_is_asked_for_again() -> None:
    """The second request has the call, and the tool's result says what was wrong."""
    error = error_of(
        InstructorRetryException,
        lambda: client(instructor.Mode.TOOLS).create(Refused, USER, model=MODEL, max_retries=1, **LIMITED),
    )
    assert error.n_attempts == 2, error.n_attempts
    assert "is unknown" in str(error)


if __name__ == "__main__":
    main("instructor")
