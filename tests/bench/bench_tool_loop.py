"""The cached share of each prompt in a loop of tool calls, as an agent sends them with OpenAI's client.

    python -m tests.bench.bench_tool_loop TEMPLATE.jinja [--turns 30]

The model is a tiny one of random weights; a grammar makes it write calls. Each turn sends the whole conversation again,
with the arguments spelled in the client's way. `lost` are tokens that the model has seen before and computes again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from edgelm.backends.model import LoadedModel
from tests.served import loaded_model, served
from tests.tiny import write_tiny

SYSTEM = "You are a helpful assistant that looks facts up before it answers. " * 40  # agents send thousands of tokens
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["cat", "dog"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"The tool {name}. " * 16, "parameters": PARAMETERS}}
    for name in ("weather", "traffic")
]


async def cached_shares(model: LoadedModel, turns: int, *, tool_choice: Any = "required") -> list[tuple[float, int]]:
    """Return the cached share and the number of lost tokens of each prompt.

    Raises RuntimeError if a call is not finished.
    """
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "How are the cities?"}]
    shares, seen = [], 0
    async with served(model) as edgelm:
        for turn in range(turns):
            answer = await edgelm.client.chat.completions.create(
                model="m",
                messages=messages,
                tools=TOOLS,
                tool_choice=tool_choice,
                parallel_tool_calls=False,
                temperature=1,
                seed=turn,
                max_tokens=400,
                extra_body={"reasoning_budget": 8},
            )
            usage, (choice,) = answer.usage, answer.choices
            assert usage
            assert usage.prompt_tokens_details
            cached = usage.prompt_tokens_details.cached_tokens or 0
            shares.append((cached / usage.prompt_tokens, max(seen - cached, 0)))
            seen = usage.total_tokens
            if choice.finish_reason != "tool_calls":
                raise RuntimeError(f"turn {turn} ended with {choice.finish_reason}")
            message: dict[str, Any] = choice.message.model_dump(exclude_none=True)
            message.pop("reasoning", None)
            for call in message["tool_calls"]:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": f"It is {turn} degrees"}
                for call in message["tool_calls"]
            ]
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("template", type=Path)
    parser.add_argument("--turns", type=int, default=30)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = arguments.template.read_text(encoding="utf-8")
        controls = tuple(sorted(set(re.findall(r"<\|[^<>|\n' ]{1,40}\|>|\[/?[A-Z_]{4,}\]", source))))
        path = Path(folder) / "tiny.gguf"
        write_tiny(path, chat_template=source, control=controls, context=32_768, quant="q8_0")
        with loaded_model(path, context=32_768) as model:
            shares = asyncio.run(cached_shares(model, arguments.turns))
    for turn, (share, lost) in enumerate(shares):
        print(f"turn {turn:2}  cached {share:.3f}  lost {lost}")
    if shares[3:]:
        print(f"least after the third turn: {min(shares[3:])[0]:.3f}")


if __name__ == "__main__":
    main()
