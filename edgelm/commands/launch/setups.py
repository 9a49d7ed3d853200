"""How each agent is told about the server and the model: by flags, by its environment, and by files of ours.

Owns the setups and the entries in the agents' own formats. No key is in a flag or a file: the agent reads it from its
environment. Knows nothing of servers, and starts nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY = "EDGELM_AGENT_KEY"  # variable of the key, where an agent lets us name it
PROVIDER = "edgelm"
MAX_OUTPUT = 16_384


@dataclass(frozen=True, slots=True)
class Target:
    """The model that an agent uses, and where."""

    address: str  # without /v1
    model: str
    context: int
    folder: Path  # of ours, for this agent's files

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    @property
    def output(self) -> int:
        """The most tokens of an answer: a quarter of the context, so that compacting has room."""
        return min(MAX_OUTPUT, self.context // 4)


@dataclass(frozen=True, slots=True)
class Setup:
    """The words before the user's arguments, the environment without the key, and files of ours with their texts."""

    words: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)


def claude(target: Target) -> Setup:
    """Return the setup of Claude Code: environment alone."""
    small = dict.fromkeys(
        (
            "ANTHROPIC_MODEL",
            "ANTHROPIC_DEFAULT_OPUS_MODEL",
            "ANTHROPIC_DEFAULT_SONNET_MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL",
            "CLAUDE_CODE_SUBAGENT_MODEL",
        ),
        target.model,
    )
    return Setup(
        environment={
            "ANTHROPIC_BASE_URL": target.address,
            "ANTHROPIC_API_KEY": "",  # or else it asks which of two keys to use
            **dict.fromkeys((f"CLAUDE_CODE_USE_{name}" for name in ("BEDROCK", "VERTEX", "FOUNDRY")), ""),
            **small,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),  # it takes 200,000 for an unknown model
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.output),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a first line that changes would spoil the cached prompt
            "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "API_TIMEOUT_MS": "3000000",  # a first prompt on a processor takes minutes
        }
    )


def codex(target: Target) -> Setup:
    """Return the setup of Codex: flags and a catalogue of models, with few tools for a short first prompt."""
    catalogue = target.folder / "models.json"
    provider = {
        "name": "edgelm",
        "base_url": target.base_url,
        "wire_api": "responses",
        "env_key": KEY,
        "stream_idle_timeout_ms": 3_000_000,
    }
    values: dict[str, Any] = {
        "model": target.model,
        "model_provider": PROVIDER,
        f"model_providers.{PROVIDER}": provider,
        "model_catalog_json": str(catalogue),
        "web_search": "disabled",
        "features.multi_agent": False,
        "features.goals": False,
    }
    words = [word for name, value in values.items() for word in ("-c", f"{name}={toml_value(value)}")]
    return Setup(tuple(words), files={catalogue: _json(codex_catalogue(target))})


def codex_catalogue(target: Target) -> dict[str, Any]:
    """Return the document of `model_catalog_json`: what Codex would else not know of a local model."""
    model = {
        "slug": target.model,
        "display_name": target.model,
        "context_window": target.context,
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "input_modalities": ["text"],
        "base_instructions": "",
        "support_verbosity": False,
        "default_verbosity": None,
        "supports_parallel_tool_calls": False,
        "supports_reasoning_summaries": False,
        "supported_reasoning_levels": [],
        "experimental_supported_tools": [],
    }
    return {"models": [model]}


def opencode(target: Target) -> Setup:
    """Return the setup of OpenCode: one variable, which it merges over the user's own files."""
    name = f"{PROVIDER}/{target.model}"
    document = {
        "model": name,
        "small_model": name,  # of titles: no second model is loaded for them
        "provider": {PROVIDER: opencode_provider(target)},
    }
    return Setup(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(document)})


def opencode_provider(target: Target) -> dict[str, Any]:
    """Return OpenCode's provider."""
    limit = {"context": target.context, "output": target.output}
    return {
        "npm": "@ai-sdk/openai-compatible",
        "name": "edgelm",
        "options": {"baseURL": target.base_url, "apiKey": f"{{env:{KEY}}}"},
        "models": {target.model: {"name": target.model, "tool_call": True, "limit": limit}},
    }


def pi(target: Target) -> Setup:
    """Return the setup of Pi: an extension of ours that registers the provider."""
    extension = target.folder / "extension.js"
    # Read by the extension: versions of Pi differ in how they find a variable that is named in a setting.
    provider = json.dumps(pi_provider(target), indent=2)
    text = (
        "export default (pi) => {\n"
        f"  const provider = {provider};\n"
        f"  provider.apiKey = process.env.{KEY};\n"
        f'  pi.registerProvider("{PROVIDER}", provider);\n'
        "};\n"
    )
    words = ("--extension", str(extension), "--provider", PROVIDER, "--model", target.model)
    environment = {"PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"}
    return Setup(words, environment, {extension: text})


def pi_provider(target: Target) -> dict[str, Any]:
    """Return Pi's provider, with the variable of the key."""
    model = {
        "id": target.model,
        "name": target.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": target.context,
        "maxTokens": target.output,
    }
    return {"name": "edgelm", "baseUrl": target.base_url, "apiKey": KEY, "api": "openai-completions", "models": [model]}


def cline(target: Target) -> Setup:
    """Return the setup of Cline: a file of ours in place of its own list of providers."""
    file = target.folder / "providers.json"
    environment = {"CLINE_PROVIDER_SETTINGS_PATH": str(file)}
    return Setup(environment=environment, files={file: _json(cline_providers(target))})


def cline_providers(target: Target) -> dict[str, Any]:
    """Return Cline's file of providers; without a key in it, it reads OPENAI_API_KEY."""
    settings = {
        "provider": "openai-compatible",
        "model": target.model,
        "baseUrl": target.base_url,
        "maxTokens": target.output,
        "contextWindow": target.context,
    }
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    return {
        "version": 1,
        "lastUsedProvider": "openai-compatible",
        "modes": {},
        "providers": {"openai-compatible": entry},
    }


def aider(target: Target) -> Setup:
    """Return the setup of aider: its variables, and a file with the limits of the model."""
    file = target.folder / "models.json"
    limits = {
        "max_tokens": target.output,
        "max_input_tokens": target.context,
        "max_output_tokens": target.output,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    name = f"openai/{target.model}"
    return Setup(
        environment={
            "OPENAI_API_BASE": target.base_url,
            "OPENAI_BASE_URL": target.base_url,  # litellm prefers it, and the user may have set it
            "AIDER_MODEL": name,
            "AIDER_WEAK_MODEL": name,
            "AIDER_MODEL_METADATA_FILE": str(file),
            "AIDER_SHOW_MODEL_WARNINGS": "false",
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_ANALYTICS": "false",
            "AIDER_TIMEOUT": "3000",
        },
        files={file: _json({name: limits})},
    )


def continue_(target: Target) -> Setup:
    """Return the setup of Continue's `cn`: a configuration of ours, which names the variable of the key."""
    file = target.folder / "config.yaml"
    document = {"name": "edgelm", "version": "1.0.0", "schema": "v1", "models": [continue_model(target)]}
    environment = {"CONTINUE_METRICS_ENABLED": "0", "CONTINUE_CLI_ENABLE_TELEMETRY": "0"}
    return Setup(("--config", str(file)), environment, {file: _json(document)})  # YAML reads JSON


def continue_model(target: Target) -> dict[str, Any]:
    """Return the entry of a model in Continue's config.yaml."""
    return {
        "name": target.model,
        "provider": "openai",
        "model": target.model,
        "apiBase": target.base_url,
        "apiKey": f"${{{{ secrets.{KEY} }}}}",
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": target.context, "maxTokens": target.output},
    }


def llm(target: Target) -> Setup:
    """Return the setup of llm: a folder of ours, with logs of its own, in place of the user's."""
    folder = target.folder
    return Setup(
        environment={"LLM_USER_PATH": str(folder)},
        files={
            folder / "extra-openai-models.yaml": _json([llm_model(target)]),
            folder / "default_model.txt": f"{PROVIDER}/{target.model}",
        },
    )


def llm_model(target: Target) -> dict[str, Any]:
    """Return the entry of a model in extra-openai-models.yaml; the key is in OPENAI_API_KEY if llm stores none."""
    return {
        "model_id": f"{PROVIDER}/{target.model}",
        "model_name": target.model,
        "api_base": target.base_url,
        "api_key_name": PROVIDER,
        "supports_tools": True,
        "supports_schema": True,
        "can_stream": True,
    }


def toml_value(value: object) -> str:
    """Return a text, number, switch or flat table as TOML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml_value(item)}" for name, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)  # TOML's strings, numbers and switches are JSON's


def _json(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
