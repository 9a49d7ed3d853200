"""The generic call format, for models whose template knows no tools or whose format is not found.

The tools are described in a text of ours, at the end of the system message; calls and results stand in ordinary
messages. Under a grammar every model can write the calls.

Owns that text and the rewriting of messages. Knows no template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgelm.text.calls.format import Call, CallFormat, to_json, write_calls
from edgelm.text.calls.known import HERMES
from edgelm.text.history import arguments_of

GENERIC = HERMES
_EXAMPLE = Call("NAME", {"PARAMETER": "VALUE"}, "abcdefgh1")


def tools_text(form: CallFormat, tools: Sequence[Mapping[str, Any]], *, results: bool = False) -> str:
    """Return the text that tells a model which tools it has, and how to call them.

    `results`: the template shows results in its own way.
    """
    where = "" if results else ", between <tool_response> and </tool_response>"
    lines = "\n".join(to_json(tool.get("function", tool)) for tool in tools)
    example = write_calls(form, [_EXAMPLE])
    return (
        "You can call tools. This is one JSON object a tool, with its name, its description and the JSON schema of its "
        f"parameters:\n<tools>\n{lines}\n</tools>\n"
        "Call a tool only if it helps to answer. To call one, write exactly this, with the tool's name and its "
        f"parameters:\n{example}\n"
        f"Then stop: the result comes in the next message{where}."
    )


def with_tools_text(
    messages: Sequence[Mapping[str, Any]],
    form: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    results: bool = False,
) -> list[dict[str, Any]]:
    """Return the messages with the description of the tools in the system message. For `results` see `tools_text`."""
    text = tools_text(form, tools, results=results)
    read = [dict(message) for message in messages]
    if read and read[0].get("role") in ("system", "developer") and isinstance(read[0].get("content"), str):
        read[0]["content"] = f"{read[0]['content']}\n\n{text}".strip()
        return read
    return [{"role": "system", "content": text}, *read]


def with_plain_calls(
    messages: Sequence[Mapping[str, Any]], form: CallFormat, *, results: bool = False
) -> list[dict[str, Any]]:
    """Return the messages with calls as text of the assistant, and results as messages of the user.

    `results`: the template shows results, which stay as they are, with the names of their tools.
    """
    read: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the tools, by the ids of calls
    last_is_result = False  # of the user
    for message in messages:
        if message.get("role") == "tool" and results:
            name = names.get(str(message.get("tool_call_id")))
            read.append({**({"name": name} if name else {}), **message})
            continue
        if message.get("role") == "tool":
            text = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            if last_is_result:
                read[-1]["content"] += "\n" + text
            else:
                read.append({"role": "user", "content": text})
            last_is_result = True
            continue
        last_is_result = False
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = message.get("tool_calls")
        if calls:
            written = [_call(one) for one in calls]
            names |= {call.id: call.name for call in written}
            plain["content"] = f"{_text(message.get('content'))}\n{write_calls(form, written)}".strip()
        read.append(plain)
    return read


def _call(call: Mapping[str, Any]) -> Call:
    function = call.get("function") or {}
    return Call(str(function.get("name")), arguments_of(function.get("arguments")), str(call.get("id") or ""))


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
