"""The sampling parameters of a request: for each, one entry with its range, its names in the APIs and its help.

Owns what a value may be, and the defaults of the settings. engine/sampling/reference.py owns the meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from edgelm.base.errors import RequestError
from edgelm.base.setting_checks import Check, number, setting_field

DraftChoice = Literal["auto", "ngram", "mtp", "off"]  # of a request: auto is all that its model has
MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParam:
    """The entry of one parameter."""

    kind: type[int | float]
    check: Check  # of a value that a user types; narrower than the range
    help: str  # in the dialog of a chat
    allowed: str  # the range in words
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    other_names: tuple[str, ...] = ()  # in an API
    in_openai: bool = False  # an endpoint that is not edgelm knows it

    def allows(self, value: float) -> bool:
        """Return whether a value is in the range."""
        return (
            -math.inf < value < math.inf
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


def _param(off: float, check: Check, help_text: str, allowed: str, **more: Any) -> Any:
    """Define a parameter; `off` is the value without effect."""
    entry = SamplingParam(kind=type(off), check=check, help=help_text, allowed=allowed, **more)
    return field(default=off, metadata={"entry": entry})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request. The defaults leave the model's own distribution unchanged.

    Raises RequestError for a value outside its range.
    """

    max_tokens: int | None = None  # None: until the model stops or its context is full
    temperature: float = _param(  # 0: greedy
        1.0,
        number(float, 0, 100, "0 to 100"),
        "0 always takes the likeliest token",
        "a number of at least 0",
        ge=0,
        in_openai=True,
    )
    top_k: int = _param(  # 0: all
        0,
        number(int, 0, 2**31 - 1, "0 (off) or more"),
        "from the K likeliest tokens; 0 is off",
        "0 (off) or more",
        ge=0,
    )
    top_p: float = _param(
        1.0,
        number(float, 1e-9, 1, "more than 0 and at most 1"),
        "from the likeliest, up to this sum",
        "more than 0 and at most 1",
        gt=0,
        le=1,
        in_openai=True,
    )
    min_p: float = _param(  # relative to the most likely token
        0.0,
        number(float, 0, 0.999999, "0 to less than 1"),
        "none below this share of the best",
        "at least 0 and less than 1",
        ge=0,
        lt=1,
    )
    repetition_penalty: float = _param(  # over prompt and answer
        1.0,
        number(float, 0.01, 10, "0.01 to 10"),
        "1 is off; 1.1 avoids repetition",
        "more than 0",
        gt=0,
        other_names=("repeat_penalty",),  # llama-server's and Ollama's
    )
    frequency_penalty: float = _param(  # over the answer, times the count
        0.0, number(float, -2, 2, "-2 to 2"), "against frequent tokens; 0 is off", "a finite number", in_openai=True
    )
    presence_penalty: float = _param(  # over the answer
        0.0, number(float, -2, 2, "-2 to 2"), "against tokens used once; 0 is off", "a finite number", in_openai=True
    )
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0  # index among several answers to one prompt; each has its own random stream
    num_logprobs: int | None = None  # None: no log-probabilities; N: the token's own and the N most likely
    stop_ids: frozenset[int] = frozenset()  # end the sequence; the stop token is its last
    draft: DraftChoice = "auto"  # who may draft

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, value: object, allowed: str) -> None:
            if not ok:
                raise RequestError(f"{name} is {value}", f"give {allowed}")

        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        for name, param in SAMPLING.items():
            require(param.allows(getattr(self, name)), name, getattr(self, name), param.allowed)
        for token, bias in self.logit_bias:
            require(token >= 0, "a token id of logit_bias", token, "0 or more")
            require(not math.isnan(bias), "a value of logit_bias", bias, "a number")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, "0 to 2**64 - 1")
        require(0 <= self.choice < 2**32, "choice", self.choice, "0 or more")
        count = self.num_logprobs
        require(count is None or 0 <= count <= MAX_LOGPROBS, "num_logprobs", count, f"0 to {MAX_LOGPROBS}")

    @property
    def drafts(self) -> bool:
        """Whether anyone may draft."""
        return self.draft != "off"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


# The parameters that are a number with a range.
SAMPLING: Mapping[str, SamplingParam] = {
    entry.name: entry.metadata["entry"] for entry in fields(SamplingParams) if entry.metadata
}


# What is sampled where neither a request nor a setting nor the model's file says anything.
DEFAULT_SAMPLING: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def _setting(name: str, help_text: str) -> Any:
    """Define the setting of a parameter that a model's file may recommend."""
    text = f"{help_text} (default: as the model's file recommends, else {DEFAULT_SAMPLING[name]})"
    return setting_field(None, SAMPLING[name].check, text, "run", sampling=True)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The parameters that have a setting. A request without a value takes the setting's."""

    temperature: float | None = _setting("temperature", "0 is greedy")
    top_k: int | None = _setting("top_k", "sample among the K most likely tokens")
    top_p: float | None = _setting(
        "top_p", "sample among the most likely tokens that have this share of the probability"
    )
    min_p: float | None = _setting("min_p", "drop tokens below this share of the best token's probability")
    seed: int | None = setting_field(
        None,
        number(int, 0, 2**63 - 1, "0 to 2**63 - 1"),
        "for answers that can be repeated: to the letter with --repeatable",
        "run",
        sampling=True,
    )
    max_tokens: int | None = setting_field(
        None,
        number(int, 1, 2**31 - 1, "a whole number of at least 1"),
        "end the answer there (default: where the model does)",
        "run",
        sampling=True,
    )

    def as_params(self) -> dict[str, Any]:
        """Return the values that are set, as fields of SamplingParams."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(SamplingSettings)}
        return {name: value for name, value in values.items() if value is not None}
