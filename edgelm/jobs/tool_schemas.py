"""The schemas of a request's tools, checked: those that no grammar can enforce in full are relaxed or refused.

Owns the budget of one request's checks, and the results that are kept. How a schema is relaxed is the worker's matter
(engine/sampling/grammar_worker.py).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from edgelm.base.errors import RequestError
from edgelm.base.workers.grammars import CheckedGrammar, GrammarSpec
from edgelm.text.calls.schema import ToolSchema, parameters_of

MAX_CHECKS = 128  # of one request; kept results cost none
MAX_CPU_S = 4.0  # of one request's checks
REFUSED_CPU_S = 2.0  # counted for a check that the worker did not survive
MAX_KEPT = 512  # schemas whose results are kept, least recently used out first: an entry takes kilobytes
MAX_KEPT_CHARS = 2**22  # of them all
_ANYTHING: dict[str, Any] = {"type": "object"}


class ToolSchemas:
    """Fits schemas to what grammars can enforce. `check` tries one in a process of its own. For one event loop."""

    def __init__(self, check: Callable[[GrammarSpec], Awaitable[CheckedGrammar]]) -> None:
        self._check = check
        self._kept: OrderedDict[GrammarSpec, ToolSchema | RequestError] = OrderedDict()
        self._kept_chars = 0

    async def of(self, functions: Sequence[Mapping[str, Any]]) -> dict[str, ToolSchema]:
        """Return the schemas by the names of their tools. Cancelling it ends the check in progress.

        What exceeds the budget of one request is relaxed without a check. Raises RequestError for a schema that is too
        large, and for one of a strict tool that cannot be enforced; EngineError if a check cannot be made.
        """
        fitted: dict[str, ToolSchema] = {}
        num_checks, cpu_s = 0, 0.0
        for function in sorted(functions, key=lambda function: not function.get("strict")):
            name, is_strict = str(function.get("name")), bool(function.get("strict"))
            schema = parameters_of(function)
            spec = GrammarSpec("json_schema", json.dumps(schema), strict=is_strict)
            result: ToolSchema | RequestError
            if not function.get("parameters"):
                result = ToolSchema(schema)
            elif spec in self._kept:
                self._kept.move_to_end(spec)
                result = self._kept[spec]
            elif num_checks < MAX_CHECKS and cpu_s < MAX_CPU_S:
                result, used_s = await self._fit(spec)
                num_checks, cpu_s = num_checks + 1, cpu_s + used_s
                self._keep(spec, result)
            else:
                reason = "the schemas of all tools take too long to check"
                result = RequestError(reason) if is_strict else ToolSchema(_ANYTHING, reason)
            if isinstance(result, RequestError):
                raise RequestError(
                    f"the schema of the strict tool {name} cannot be enforced: {result.message}",
                    "change the schema, or drop strict",
                )
            fitted[name] = result
        return fitted

    async def _fit(self, spec: GrammarSpec) -> tuple[ToolSchema | RequestError, float]:
        """Return the result of a check, and its processor time. A schema that ends its check is not tried again."""
        try:
            checked = await self._check(spec)
        except RequestError as error:
            # A new error: one that was raised keeps the frames of its check, and what these hold.
            kept = RequestError(error.message, error.hint) if spec.strict else ToolSchema(_ANYTHING, error.message)
            return kept, REFUSED_CPU_S
        schema = {"type": "object", **json.loads(checked.grammar)["grammars"][0]["json_schema"]}
        options = schema.pop("x-guidance")
        if not checked.relaxed:
            return ToolSchema(schema, unique=checked.unique), checked.cpu_s
        relaxed = {**schema, "x-guidance": {"lenient": options["lenient"]}}
        keywords = ", ".join(word if " " in word else f'"{word}"' for word in checked.relaxed)
        return ToolSchema(relaxed, f"calls are not held to {keywords}", checked.unique), checked.cpu_s

    def _keep(self, spec: GrammarSpec, result: ToolSchema | RequestError) -> None:
        if spec not in self._kept:  # another request may have been faster
            self._kept_chars += len(spec.source)
        self._kept[spec] = result
        while len(self._kept) > MAX_KEPT or self._kept_chars > MAX_KEPT_CHARS:
            self._kept_chars -= len(self._kept.popitem(last=False)[0].source)
