"""The agents' own configuration files, for `edgelm launch AGENT --config`: where they are, and our entry in each.

Owns what is added. A key is never written: an entry names its variable where the agent can read one. Documents are
edited in place, so all that is not ours stays. Reads and writes no file: files.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer

from edgelm.commands.launch.agents import Agent
from edgelm.commands.launch.setups import (
    KEY,
    PROVIDER,
    Target,
    cline_providers,
    codex_catalogue,
    continue_model,
    llm_model,
    opencode_provider,
    pi_provider,
)

Format = Literal["json", "toml", "yaml"]
Document = Any  # a dict or a list, as the format's library makes it


@dataclass(frozen=True, slots=True)
class UserFile:
    """A file of the user, and the edit that adds the model to its document."""

    path: Path
    format: Format
    edit: Callable[[Document], None]
    empty: Callable[[], Document] = dict


@dataclass(frozen=True, slots=True)
class UserConfig:
    """The files of an agent, and how it is started with them."""

    files: tuple[UserFile, ...]
    start: str


def user_config(agent: Agent, target: Target, environment: Mapping[str, str]) -> UserConfig:
    """Return the files and edits of --config for an agent."""
    return _CONFIGS[agent.name](agent, target, environment)


def _home(environment: Mapping[str, str], variable: str, *default: str) -> Path:
    """Return an agent's folder: that of its variable, or one in the home folder."""
    return Path(environment.get(variable) or Path.home().joinpath(*default))


def _claude(agent: Agent, target: Target, environment: Mapping[str, str]) -> UserConfig:
    def edit(document: Document) -> None:
        values = dict(agent.setup(target).environment)
        del values["ANTHROPIC_API_KEY"]
        document.setdefault("env", {}).update(values)

    path = _home(environment, "CLAUDE_CONFIG_DIR", ".claude") / "settings.json"
    return UserConfig((UserFile(path, "json", edit),), "claude")


def _codex(_: Agent, target: Target, environment: Mapping[str, str]) -> UserConfig:
    home = _home(environment, "CODEX_HOME", ".codex")
    models = home / "edgelm.models.json"

    def provider(document: Document) -> None:
        entry = {"name": "edgelm", "base_url": target.base_url, "wire_api": "responses", "env_key": KEY}
        document.setdefault("model_providers", {})[PROVIDER] = entry

    def profile(document: Document) -> None:
        document |= {
            "model": target.model,
            "model_provider": PROVIDER,
            "model_catalog_json": str(models),
            "web_search": "disabled",
        }

    files = (
        UserFile(home / "config.toml", "toml", provider),
        UserFile(home / "edgelm.base.config.toml", "toml", profile),
        UserFile(models, "json", lambda document: document.update(codex_catalogue(target))),
    )
    return UserConfig(files, "codex --profile edgelm")


def _opencode(_: Agent, target: Target, environment: Mapping[str, str]) -> UserConfig:
    def edit(document: Document) -> None:
        document.setdefault("provider", {})[PROVIDER] = opencode_provider(target)

    folder = _home(environment, "XDG_CONFIG_HOME", ".config") / "opencode"
    name = "opencode.jsonc" if (folder / "opencode.jsonc").exists() else "opencode.json"
    return UserConfig((UserFile(folder / name, "json", edit),), f"opencode --model {PROVIDER}/{target.model}")


def _pi(_: Agent, target: Target, environment: Mapping[str, str]) -> UserConfig:
    def edit(document: Document) -> None:
        document.setdefault("providers", {})[PROVIDER] = pi_provider(target)

    path = _home(environment, "PI_CODING_AGENT_DIR", ".pi", "agent") / "models.json"
    return UserConfig((UserFile(path, "json", edit),), f"pi --provider {PROVIDER} --model {target.model}")


def _cline(_: Agent, target: Target, environment: Mapping[str, str]) -> UserConfig:
    def edit(document: Document) -> None:
        ours = cline_providers(target)
        document.setdefault("version", ours["version"])
        document.setdefault("modes", {})
        document["lastUsedProvider"] = ours["lastUsedProvider"]
        document.setdefault("providers", {}).update(ours["providers"])

    path = _home(environment, "CLINE_DIR", ".cline") / "data" / "settings" / "providers.json"
    return UserConfig((UserFile(path, "json", edit),), "cline")


def _aider(_: Agent, target: Target, __: Mapping[str, str]) -> UserConfig:
    def edit(document: Document) -> None:
        name = f"openai/{target.model}"
        document |= {"model": name, "weak-model": name, "openai-api-base": target.base_url}

    return UserConfig((UserFile(Path.home() / ".aider.conf.yml", "yaml", edit),), "aider")


def _continue(_: Agent, target: Target, environment: Mapping[str, str]) -> UserConfig:
    def edit(document: Document) -> None:
        for name, value in (("name", "edgelm"), ("version", "1.0.0"), ("schema", "v1")):
            document.setdefault(name, value)
        _put(document.setdefault("models", []), continue_model(target), "name")

    path = _home(environment, "CONTINUE_GLOBAL_DIR", ".continue") / "config.yaml"
    return UserConfig((UserFile(path, "yaml", edit),), "cn")


def _llm(_: Agent, target: Target, environment: Mapping[str, str]) -> UserConfig:
    def edit(document: Document) -> None:
        _put(document, llm_model(target), "model_id")

    folder = Path(environment.get("LLM_USER_PATH") or typer.get_app_dir("io.datasette.llm"))
    file = UserFile(folder / "extra-openai-models.yaml", "yaml", edit, list)
    return UserConfig((file,), f"llm -m {PROVIDER}/{target.model}")


def _put(entries: Document, entry: dict[str, Any], name: str) -> None:
    """Replace the entry of that name in a list, or append it."""
    for at, other in enumerate(entries):
        if isinstance(other, Mapping) and other.get(name) == entry[name]:
            entries[at] = entry
            return
    entries.append(entry)


_CONFIGS: dict[str, Callable[[Agent, Target, Mapping[str, str]], UserConfig]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "pi": _pi,
    "cline": _cline,
    "aider": _aider,
    "continue": _continue,
    "llm": _llm,
}
