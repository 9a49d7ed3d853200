# ruff: noqa: RUF001 - the marks of DeepSeek are written with full-width characters
"""The table of known call formats, found by strings that stand in a model's chat template.

A format is here if its models have habits that their template does not show, or if derive.py cannot find it. Each row
was compared with the templates of its models.

Owns the rows. Knows nothing of parsing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from edgelm.text.calls.format import GEMMA_QUOTE, CallFormat

# Qwen3-Coder often omits `<tool_call>`.
_FUNCTION_TAGS = CallFormat(
    name="function tags without a frame",
    body="tagged",
    call=("<function=", "</function>"),
    name_end=">\n",
    arg=("<parameter=", ">\n", "\n</parameter>\n"),
    raw="python",
    known_names=True,
)
_HERMES_CALL = CallFormat(name="Hermes", body="json", call=("<tool_call>\n", "\n</tool_call>"), separator="\n")
_DSML = CallFormat(
    name="DSML",
    body="tagged",
    section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>\n"),
    name_end='">\n',
    arg=('<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>\n"),
    value_mark='" string="false">',
)
_GLM = CallFormat(
    name="GLM 4.5",
    body="tagged",
    call=("<tool_call>", "</tool_call>"),
    name_end="\n",
    separator="\n",
    arg=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
_MISTRAL_ARGS = CallFormat(
    name="Mistral [ARGS]", body="name_json", call=("[TOOL_CALLS]", ""), name_end="[ARGS]", id_rule="alnum9"
)
_MISTRAL_LIST = CallFormat(
    name="Mistral list",
    body="json",
    section=("[TOOL_CALLS][", "]"),
    separator=", ",
    keys=("name", "arguments", "id"),
    id_rule="alnum9",
)
_COHERE = CallFormat(
    name="Cohere actions",
    body="json",
    section=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
    separator=",\n    ",
    keys=("tool_name", "parameters", "tool_call_id"),
    id_first=True,
    id_rule="index",
    drop=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
_PYTHON = CallFormat(
    name="Python calls",
    body="python",
    section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
    call=("", ")"),
    separator=", ",
    name_end="(",
)
HERMES = replace(_HERMES_CALL, also=(_FUNCTION_TAGS,))

# Rows whose strings all stand in the template; of several, derive.py takes the one that predicts what it writes.
KNOWN: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<|channel|>", "<|message|>", "<|call|>"), CallFormat(name="Harmony", body="harmony", parallel=False)),
    (
        ("<|tool_call>call:",),
        CallFormat(
            name="Gemma 4", body="gemma", call=("<|tool_call>call:", "<tool_call|>"), arg=("", GEMMA_QUOTE, ""),
            drop=("<|tool_response>",),
        ),
    ),
    (
        ("<|tool_calls_section_begin|>",),
        CallFormat(
            name="Kimi K2",
            body="name_json",
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            call=("<|tool_call_begin|>", "<|tool_call_end|>"),
            name_end="<|tool_call_argument_begin|>",
            id_rule="functions",
        ),
    ),
    (("｜DSML｜", "function_calls"), _DSML),
    (
        ("｜DSML｜", "tool_calls"),
        replace(_DSML, section=("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>")),
    ),
    (
        ("<｜tool▁calls▁begin｜>", "```json"),
        CallFormat(
            name="DeepSeek R1 and V3",
            body="name_json",
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"),
            name_end="\n```json\n",
            separator="\n",
        ),
    ),
    (
        ("<｜tool▁calls▁begin｜>",),
        CallFormat(
            name="DeepSeek V3.1",
            body="name_json",
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            name_end="<｜tool▁sep｜>",
        ),
    ),
    (
        ("[TOOL_CALLS]", "[CALL_ID]"),
        replace(_MISTRAL_ARGS, id_after="[CALL_ID]", also=(_MISTRAL_LIST,)),
    ),
    (("[TOOL_CALLS]", "[ARGS]"), replace(_MISTRAL_ARGS, also=(_MISTRAL_LIST,))),
    (("[TOOL_CALLS]",), replace(_MISTRAL_LIST, also=(_MISTRAL_ARGS,))),
    (
        ("<seed:tool_call>",),
        CallFormat(
            name="Seed-OSS",
            body="tagged",
            call=("<seed:tool_call>\n<function=", "</function>\n</seed:tool_call>"),
            name_end=">\n",
            separator="\n",
            arg=("<parameter=", ">", "</parameter>\n"),
            raw="python",
        ),
    ),
    (
        ("<minimax:tool_call>",),
        CallFormat(
            name="MiniMax M2",
            body="tagged",
            section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
            call=('<invoke name="', "</invoke>\n"),
            name_end='">\n',
            arg=('<parameter name="', '">', "</parameter>\n"),
        ),
    ),
    (
        ("<tool_call>", "<arg_key>"),
        _GLM,
    ),
    (
        ("<tool_call>", "<arg_key>"),
        replace(
            _GLM, name="GLM 4.7", name_end="", separator="", arg=("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
        ),
    ),
    (
        ("<tool_call>", "<function="),
        CallFormat(
            name="Qwen3-Coder",
            body="tagged",
            call=("<tool_call>\n<function=", "</function>\n</tool_call>"),
            name_end=">\n",
            separator="\n",
            arg=("<parameter=", ">\n", "\n</parameter>\n"),
            raw="python",
            also=(_HERMES_CALL, _FUNCTION_TAGS),
        ),
    ),
    (("<|START_ACTION|>",), _COHERE),
    (
        ("Action:", "```json", "tool_name"),
        CallFormat(
            name="Command R+",
            body="json",
            section=("Action: ```json\n[\n    ", "\n]```"),
            separator=",\n    ",
            keys=("tool_name", "parameters", ""),
        ),
    ),
    (
        (">>>all", "recipient"),
        CallFormat(
            name="Functionary 3.2",
            body="name_json",
            call=(">>>", ""),
            name_end="\n",
            known_names=True,
            drop=(">>>all\n",),
        ),
    ),
    (
        ("<function=", "</function>", "<|eom_id|>"),
        CallFormat(
            name="Functionary 3.1",
            body="name_json",
            call=("<function=", "</function>"),
            name_end=">",
            also=(
                CallFormat(
                    name="Python tool", body="python", call=("<|python_tag|>", ")"), name_end="(", known_names=True
                ),
            ),
        ),
    ),
    (
        ('{"name": function name, "parameters": ',),
        CallFormat(
            name="Llama 3",
            body="json",
            separator="; ",
            keys=("name", "parameters", ""),
            parallel=False,
            at_start=True,
            known_names=True,
            also=(
                CallFormat(
                    name="Llama 3 tagged JSON",
                    body="json",
                    call=("<|python_tag|>", ""),
                    separator="; ",
                    keys=("name", "parameters", ""),
                    known_names=True,
                ),
                CallFormat(
                    name="Llama 3 built-in",
                    body="python",
                    call=("<|python_tag|>", ")"),
                    name_end=".call(",
                ),
                CallFormat(
                    name="Llama 4 list",
                    body="python",
                    section=("[", "]"),
                    call=("", ")"),
                    separator=", ",
                    name_end="(",
                    at_start=True,
                    known_names=True,
                ),
            ),
        ),
    ),
    (("<|tool_call_start|>",), _PYTHON),
    (("<|tool_list_start|>",), _PYTHON),
    (
        ('<function name=', '<param name='),
        CallFormat(
            name="MiniCPM5",
            body="tagged",
            call=('<function name="', "</function>"),
            name_end='">',
            separator="\n",
            arg=('<param name="', '">', "</param>"),
            raw="python",
        ),
    ),
    (
        ("｜hy_User", "<tool_calls"),
        CallFormat(
            name="Hunyuan 3",
            body="tagged",
            section=("<tool_calls:opensource>\n", "\n</tool_calls:opensource>"),
            call=("<tool_call:opensource>", "</tool_call:opensource>"),
            name_end="<tool_sep:opensource>\n",
            separator="\n",
            arg=(
                "<arg_key:opensource>",
                "</arg_key:opensource>\n<arg_value:opensource>",
                "</arg_value:opensource>\n",
            ),
        ),
    ),
    (
        ("<|tool_call|>", "<|/tool_call|>"),
        CallFormat(
            name="Phi-4-mini",
            body="json",
            section=("<|tool_call|>[", "]<|/tool_call|>"),
            separator=", ",
            also=(CallFormat(name="functools", body="json", section=("functools[", "]"), separator=", "),),
        ),
    ),
    (
        ("functools[",),
        CallFormat(name="functools", body="json", section=("functools[", "]"), separator=", "),
    ),
    (
        ("<|tool_call|>",),
        CallFormat(name="Granite 3", body="json", section=("<|tool_call|>[", "]"), separator=", "),
    ),
    (("<TOOLCALL>",), CallFormat(
        name="Nemotron", body="json", section=("<TOOLCALL>[", "]</TOOLCALL>"), separator=", "
    )),
    (("<tool_calls>[",), CallFormat(
        name="Apriel", body="json", section=("<tool_calls>[", "]</tool_calls>"), separator=", "
    )),
    (("<tool_calls>",), CallFormat(
        name="MiniMax M1", body="json", section=("<tool_calls>\n", "\n</tool_calls>"), separator="\n"
    )),
    (("<|tools_prefix|>",), CallFormat(
        name="Apertus", body="name_json", section=("<|tools_prefix|>[", "]<|tools_suffix|>"), call=('{"', "}"),
        name_end='": ', separator=", ",
    )),
    (("<|tool_call:begin|>",), CallFormat(
        name="Solar", body="name_json", section=("<|tool_calls|>", ""), id_before="<|tool_call:name|>",
        call=("<|tool_call:begin|>", "<|tool_call:end|>"), name_end="<|tool_call:args|>",
    )),
    (("<tool_call>",), HERMES),
)  # fmt: skip


def known_formats(template: str, special_strings: Collection[str] = ()) -> list[CallFormat]:
    """Return the formats whose strings stand in a template or, if that has none, in the vocabulary; best first."""
    found = [form for marks, form in KNOWN if all(mark in template for mark in marks)]
    return found or [form for marks, form in KNOWN if len(marks) == 1 and marks[0] in special_strings]
