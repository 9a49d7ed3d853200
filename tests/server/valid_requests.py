"""Valid bodies of every route that reads one, with as many of their fields as fit together."""

from __future__ import annotations

from typing import Any

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
FUNCTION = {"name": "look", "description": "Look up", "parameters": SCHEMA}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": "Be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "3"},
                {"role": "user", "content": "and?", "name": "bob"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}, {"type": "custom", "custom": {"name": "free"}}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
        {
            "messages": [{"role": "user", "content": "a number"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 3,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
        },
        {
            "messages": [{"role": "user", "content": "yes?"}, {"role": "assistant", "content": "ye"}],
            "continue_final_message": True,
            "guided_regex": "[a-z]+",
            "stop": ["x"],
            "logit_bias": {"5": 1.5},
            "prediction": {"type": "content", "content": "yes"},
            "stream_options": {"include_usage": True},
            "edgelm": {"past": [{"role": "user", "content": "hi"}]},
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
        },
        {
            "messages": [{"role": "user", "content": "x"}],
            "functions": [FUNCTION],
            "function_call": {"name": "look"},
            "structured_outputs": {"choice": ["a", "b"]},
        },
    ],
    "/v1/completions": [
        {"prompt": "Once upon", "temperature": 0, "logprobs": 2, "echo": True},
        {"prompt": ["a", "b"], "n": 2, "best_of": 2, "stop": "x", "frequency_penalty": 0.1},
        {"prompt": [1, 2, 3], "suffix": None, "grammar": 'root ::= "a" | "b"', "seed": -1},
        {"prompt": "def f(", "suffix": "return 1", "stream_options": {"include_usage": True}},
    ],
    "/v1/responses": [
        {"input": "hi", "instructions": "Be brief", "store": True, "metadata": {"a": "b"}, "temperature": 0.5},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "thought"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a":1}'},
                {"type": "function_call_output", "call_id": "c1", "output": "3"},
                {"type": "custom_tool_call", "call_id": "c2", "name": "free", "input": "text"},
                {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "x"}]},
                {"type": "web_search_call", "id": "ws_1"},
            ],
            "tools": [
                {"type": "function", "strict": True, **FUNCTION},
                {"type": "custom", "name": "free"},
                {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]},
                {"type": "web_search"},
            ],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
            "top_logprobs": 1,
        },
        {
            "input": "json",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
            "previous_response_id": "resp_0",
            "truncation": "auto",
            "store": False,
        },
    ],
    "/v1/messages": [
        {
            "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "so", "signature": ""},
                        {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "3"}]},
            ],
            "tools": [{"name": "look", "description": "Look", "input_schema": SCHEMA}, {"type": "bash_20250124"}],
            "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
        },
        {
            "system": "Be brief",
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "{"}],
            "temperature": 1.0,
            "top_k": 5,
            "metadata": {"user_id": "u"},
        },
        {
            "messages": [{"role": "user", "content": "hi"}],
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ],
}
_OPTIONS = {"temperature": 0.5, "top_k": 4, "seed": 3, "stop": ["x"], "num_ctx": 4096, "repeat_penalty": 1.1}
VALID["/api/chat"] = [
    {
        "messages": [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "",
                "thinking": "so",
                "tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "tool_name": "look", "content": "3"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "think": False,
        "options": _OPTIONS,
    },
    {"messages": [{"role": "user", "content": "x"}], "format": SCHEMA, "logprobs": True, "top_logprobs": 2},
    {"messages": [{"role": "user", "content": "x"}], "format": "json", "options": {"num_predict": 3}},
]
VALID["/api/generate"] = [
    {"prompt": "Once upon", "system": "Be brief", "options": _OPTIONS, "think": "low"},
    {"prompt": "Once upon", "raw": True, "context": [], "images": [], "template": ""},
    {"prompt": "def f(", "suffix": "return 1"},
]
VALID["/api/embed"] = [{"input": ["a", "b"], "truncate": True, "dimensions": 8, "options": {}}, {"input": "a"}]
VALID["/api/embeddings"] = [{"prompt": "a", "options": {}}]
VALID["/api/show"] = [{"name": "starter", "verbose": True}]
VALID["/completion"] = [
    {"prompt": "Once upon", "n_indent": 2, "response_fields": ["content", "timings/prompt_n"], "samplers": ["top_k"]},
    {"prompt": [1, 2, 3], "t_max_predict_ms": 500, "stop": ["x"], "grammar": 'root ::= "a"', "cache_prompt": True},
]
VALID["/infill"] = [
    {
        "input_prefix": "def f(",
        "input_suffix": "return 1",
        "input_extra": [{"filename": "a.py", "text": "x"}],
        "prompt": "a",
        "n_indent": 4,
        "t_max_predict_ms": 250,
    }
]
VALID["/tokenize"] = [
    {"content": "Hello <|end|>", "add_special": True, "parse_special": True, "with_pieces": True},
    {"prompt": "Hello <|end|>", "add_special_tokens": True, "return_token_strs": True},
]
VALID["/detokenize"] = [{"tokens": [1, 2, 300]}]
VALID["/apply-template"] = VALID["/v1/chat/completions"]
VALID["/v1/messages/count_tokens"] = VALID["/v1/messages"]
VALID["/v1/responses/input_tokens"] = VALID["/v1/responses"]
