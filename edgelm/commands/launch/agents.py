"""The agents that `edgelm launch` knows.

Owns the table. How an agent is told about the server is a function of setups.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from edgelm.base.errors import EdgeLMError
from edgelm.commands.launch.setups import KEY, Setup, Target, aider, claude, cline, codex, continue_, llm, opencode, pi

LEAST_CONTEXT = 16_384  # below that, an agent's own instructions leave no room for work
Dialect = Literal["messages", "responses", "chat completions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A program that `edgelm launch` starts."""

    name: str
    title: str
    command: str
    install: str
    dialect: Dialect
    keys: tuple[str, ...]  # variables that carry the key
    setup: Callable[[Target], Setup]
    advised: int  # tokens of context
    least: int = LEAST_CONTEXT
    needs_tools: bool = True
    sets: str  # for docs/agents.md: what `setup` does besides address, model and limits


def find_agent(name: str) -> Agent:
    """Return the agent of a name. Raises EdgeLMError."""
    for agent in AGENTS:
        if name in (agent.name, agent.command):
            return agent
    raise EdgeLMError(f"there is no agent {name!r}", "the agents are " + ", ".join(agent.name for agent in AGENTS))


AGENTS = (
    Agent(
        name="claude",
        title="Claude Code",
        command="claude",
        install="npm install -g @anthropic-ai/claude-code",
        dialect="messages",
        keys=("ANTHROPIC_AUTH_TOKEN",),
        setup=claude,
        advised=65_536,
        least=32_768,  # its first prompt alone has some 20,000 tokens
        sets="all its models are this one; no attribution line, no reminder of tokens, no other traffic",
    ),
    Agent(
        name="codex",
        title="Codex",
        command="codex",
        install="npm install -g @openai/codex",
        dialect="responses",
        keys=(KEY,),
        setup=codex,
        advised=32_768,
        sets="no web search, no goals, no agents of its own: a first prompt of 9 kB in place of 40",
    ),
    Agent(
        name="opencode",
        title="OpenCode",
        command="opencode",
        install="npm install -g opencode-ai",
        dialect="chat completions",
        keys=(KEY,),
        setup=opencode,
        advised=32_768,
        sets="the same model writes titles",
    ),
    Agent(
        name="pi",
        title="Pi",
        command="pi",
        install="npm install -g @earendil-works/pi-coding-agent",
        dialect="chat completions",
        keys=(KEY,),
        setup=pi,
        advised=32_768,
        sets="no check for a new version, no telemetry",
    ),
    Agent(
        name="cline",
        title="Cline",
        command="cline",
        install="npm install -g cline",
        dialect="chat completions",
        keys=("OPENAI_API_KEY",),
        setup=cline,
        advised=32_768,
        sets="nothing",
    ),
    Agent(
        name="aider",
        title="aider",
        command="aider",
        install="python -m pip install aider-chat",
        dialect="chat completions",
        keys=("OPENAI_API_KEY",),
        setup=aider,
        advised=LEAST_CONTEXT,
        needs_tools=False,
        sets="the same model writes commit messages; no check for a new version, no analytics",
    ),
    Agent(
        name="continue",
        title="Continue",
        command="cn",
        install="npm install -g @continuedev/cli",
        dialect="chat completions",
        keys=(KEY,),
        setup=continue_,
        advised=32_768,
        sets="no telemetry",
    ),
    Agent(
        name="llm",
        title="llm",
        command="llm",
        install="pipx install llm",
        dialect="chat completions",
        keys=("OPENAI_API_KEY",),
        setup=llm,
        advised=LEAST_CONTEXT,
        least=4096,
        needs_tools=False,
        sets="its logs are in our folder",
    ),
)
