"""The table of agents: every setup is complete, has no key, and is what docs/agents.md says."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.commands.launch.agents import AGENTS, Agent, find_agent
from edgelm.commands.launch.setups import KEY, Target, toml_value
from edgelm.commands.launch.user_files import user_config

DOCS = Path(__file__).resolve().parents[3] / "docs" / "agents.md"


@pytest.fixture(params=AGENTS, ids=lambda agent: agent.name)
def agent(request: pytest.FixtureRequest) -> Agent:
    found: Agent = request.param
    return found


def target(folder: Path, model: str = "qwen3:4b") -> Target:
    return Target("http://127.0.0.1:11500", model, 40_000, folder)


def test_the_agents_of_the_issue_are_there() -> None:
    assert [agent.name for agent in AGENTS] == [
        "claude",
        "codex",
        "opencode",
        "pi",
        "cline",
        "aider",
        "continue",
        "llm",
    ]


def test_an_agent_is_found_by_its_program_too() -> None:
    assert find_agent("cn").name == "continue"
    with pytest.raises(EdgeLMError, match="the agents are claude, codex"):
        find_agent("emacs")


def test_a_setup_names_server_and_model(agent: Agent, tmp_path: Path) -> None:
    setup = agent.setup(target(tmp_path))
    everything = " ".join([*setup.words, *setup.environment.values(), *setup.files.values()])
    assert "http://127.0.0.1:11500" in everything
    assert "qwen3:4b" in everything
    assert all(path.is_relative_to(tmp_path) for path in setup.files)


def test_a_setup_says_the_limits(agent: Agent, tmp_path: Path) -> None:
    setup = agent.setup(target(tmp_path))
    everything = " ".join([*setup.words, *setup.environment.values(), *setup.files.values()])
    assert agent.name == "llm" or "40000" in everything  # llm has no limits


def test_the_key_is_in_the_environment_alone(agent: Agent, tmp_path: Path) -> None:
    setup = agent.setup(target(tmp_path))
    assert agent.keys
    assert not set(agent.keys) & set(setup.environment)
    assert all(not value for name, value in setup.environment.items() if "KEY" in name)


@pytest.mark.parametrize("model", ["qwen3:4b", 'a "quoted" \\ name', "two words ü", "/home/me/my model.gguf"])
def test_odd_names_of_models_are_quoted(agent: Agent, tmp_path: Path, model: str) -> None:
    setup = agent.setup(target(tmp_path, model))
    for path, text in setup.files.items():
        if path.suffix == ".json":
            assert model in str(json.loads(text)).replace("\\\\", "\\")
    for word in setup.words:
        if word.startswith("model="):
            assert tomllib.loads(word)["model"] == model


def test_toml_of_a_table() -> None:
    value = {"name": "a", "limit": 3, "on": True}
    assert tomllib.loads(f"x = {toml_value(value)}")["x"] == value


def test_every_agent_has_files_for_config(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = user_config(agent, target(tmp_path), {})
    assert config.files
    assert all(file.path.is_relative_to(tmp_path) for file in config.files)
    assert config.start.startswith(agent.command)


def agents_table() -> str:
    """Return the table of docs/agents.md."""
    rows = [
        "| agent | command | speaks | context: least, advised | how it is told | besides address, model and limits |",
        "|---|---|---|---|---|---|",
    ]
    example = Target("http://127.0.0.1:11500", "MODEL", 32_768, Path("FOLDER"))
    for agent in AGENTS:
        setup = agent.setup(example)
        ways = [
            *(["flags"] if setup.words else []),
            *[
                f"`{name}`"
                for name in setup.environment
                if name.endswith(("_CONTENT", "_PATH", "_FILE", "_URL", "_BASE"))
            ],
            *[f"our `{file.name}`" for file in setup.files],
        ]
        contexts = f"{agent.least:,}, {agent.advised:,}"
        rows.append(
            f"| {agent.title} | `{agent.command}` | {agent.dialect} | {contexts} | {', '.join(ways)}; "
            f"key: {', '.join(f'`{name}`' for name in agent.keys)} | {agent.sets} |"
        )
    return "\n".join(rows)


def test_the_table_of_the_documentation_is_this_one() -> None:
    assert agents_table() in DOCS.read_text()
    assert KEY in DOCS.read_text()


def test_variables_of_the_user_lead_no_agent_elsewhere(tmp_path: Path) -> None:
    """These beat the ones by which an agent is told the address."""
    assert find_agent("aider").setup(target(tmp_path)).environment["OPENAI_BASE_URL"] == "http://127.0.0.1:11500/v1"
    environment = find_agent("claude").setup(target(tmp_path)).environment
    assert [environment[f"CLAUDE_CODE_USE_{name}"] for name in ("BEDROCK", "VERTEX", "FOUNDRY")] == ["", "", ""]
