"""The command line: the table of commands with their help, the flags of `edgelm` itself, the exit codes of errors.

A command is a function in a module of its own, with its flags; the module is imported when the command is called, or
when its own help or completion is asked for. Knows nothing of engines, models and files.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer import exceptions as usage
from typer.core import TyperCommand, TyperGroup

from edgelm import __version__
from edgelm.base.errors import USAGE_EXIT_CODE, EdgeLMError, UsageError, one_line
from edgelm.commands.flags import EndpointKey, Flags, SettingsOf, for_typer


class Command(NamedTuple):
    """A row of the table."""

    function: str  # MODULE.FUNCTION in edgelm.commands; it may return the exit code
    help: str


class Group(NamedTuple):
    """Commands whose names follow that of the group."""

    help: str
    commands: Mapping[str, Command]


HELP_OF_TOP = """Watch a running server: requests, speed, cache hits, drafts and memory of each model. q quits.

RUN and WAIT are requests, TTFT is the time to the first token, HITS the share of prompt tokens that were cached, KV
the used share of the KV cache, DRAFTS the share of draft tokens that were accepted; means are of the last minute.
"""
HELP_OF_WATCH = """Watch the steps of a running engine: prompts, drafts, tokens and the KV cache. q quits.

Space stops and goes on; the arrow keys go back over the last 500 steps. Texts and probabilities are shown of your
own requests, of others the counts.
"""

COMMANDS: Mapping[str, Command | Group] = {  # in the order of `edgelm --help`
    "run": Command(
        "run.run_model", "Print one answer. The prompt is the argument, standard input, or both in that order."
    ),
    "bench": Command(
        "bench.bench_model",
        "Measure prompt speed (pp512 by default) and decode speed (tg128) through the endpoint, in tokens per second.",
    ),
    "embed": Command("embed.embed_texts", "Print the vectors (embeddings) of texts."),
    "eval": Command(
        "eval_command.evaluate", "Measure how well models predict a text, and how far they are from a reference."
    ),
    "convert": Command(
        "convert.convert_model", "Convert a folder of safetensors to a GGUF, with its tokenizer and chat template."
    ),
    "quantize": Command("quantize.quantize", "Write a model with fewer bits for its weights, as a new GGUF."),
    "pull": Command(
        "pull.pull_model", "Download a model from the hub. An interrupted download resumes where it stopped."
    ),
    "list": Command("list.list_models", "Show the models on this machine."),
    "show": Command(
        "show.show_model",
        "Show a model's architecture, tokenizer, template, licence and tensors, and the memory that it takes.",
    ),
    "rm": Command(
        "rm.remove_models",
        "Remove models from the hub's cache, with all bytes that nothing else uses. Your own files are never removed.",
    ),
    "serve": Command(
        "serve.serve_models", "Serve the models to other programs, in the dialects of OpenAI, Anthropic, Ollama."
    ),
    "share": Command(
        "share.share_models",
        "Serve the models here to phones and computers of this network: with a key and TLS, which it makes.",
    ),
    "launch": Command(
        "launch.command.launch_agent",
        "Start a coding agent on a model of this machine: Claude Code, Codex, OpenCode and others.",
    ),
    "load": Command("load.load_model", "Load a model into a running server."),
    "unload": Command("load.unload_models", "Unload a model of a running server."),
    "ps": Command("ps.show_processes", "Show the models that a running server has loaded."),
    "top": Command("top.show_top", HELP_OF_TOP),
    "watch": Command("watch.watch_server", HELP_OF_WATCH),
    "plan": Command(
        "plan.show_plan",
        "Show what a model takes on this machine, and which context and KV cache it will get, without loading it.",
    ),
    "help": Command(
        "help.show_help",
        "Explain how to use edgelm, by topic: start, chat, models, memory, serve, troubleshooting and others.",
    ),
    "doctor": Command("doctor.doctor", "Show what this machine can run, and what is wrong with it."),
    "config": Command("config.show_config", "Show all settings, and where each comes from."),
    "service": Group(
        "The server as a service, which other programs find at any time.",
        {
            "install": Command(
                "service.command.install_service",
                "Start `edgelm serve` with each log-in, or with the first request. Settings and keys are those of "
                "config.toml.",
            ),
            "remove": Command("service.command.remove_service", "End the service and remove its files."),
            "status": Command("service.command.show_service", "Show whether the service is installed and runs."),
            "logs": Command("service.command.show_logs", "Show the service's log."),
        },
    ),
    "chats": Group(
        "The chats of `edgelm`, for scripts: list, search, export, import, delete.",
        {
            "list": Command("chats.list_chats", "List the chats, newest first; * is pinned."),
            "show": Command("chats.show_chat", "Print a chat as Markdown."),
            "export": Command(
                "chats.export_chats", "Write chats as Markdown, JSON or HTML; without -o, one chat to standard output."
            ),
            "search": Command("chats.search_chats", "Search titles and messages; ends with 1 where nothing is found."),
            "delete": Command("chats.delete_chats", "Move chats to the trash, where `restore` finds them."),
            "restore": Command("chats.restore_chats", "Bring chats back from the trash."),
            "import": Command(
                "chats_import.import_chats",
                "Import chats of ChatGPT, Open WebUI, Ollama or edgelm. What is here already is not imported again.",
            ),
        },
    ),
    "memory": Group(
        "Past answers that speculation remembers.",
        {
            "show": Command("memory.show_answers", "Show how much is remembered, since when, and where."),
            "clear": Command("memory.clear_answers", "Forget all past answers. Chats are kept: they are elsewhere."),
        },
    ),
}


class LazyCommand(TyperCommand):
    """A command of the table. Typer reads name and help of all commands, but parses the arguments of one."""

    def __init__(self, name: str, row: Command) -> None:
        super().__init__(name, help=row.help)
        self._function = row.function

    @cached_property
    def command(self) -> Any:
        """The command itself, from its module."""
        module, _, function = self._function.rpartition(".")
        alone = typer.Typer(add_completion=False)
        alone.command(self.name, help=self.help)(
            for_typer(getattr(import_module(f"edgelm.commands.{module}"), function))
        )
        return typer.main.get_command(alone)

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        return self.command.make_context(*arguments, **named)

    def get_params(self, ctx: Any) -> Any:
        return self.command.get_params(ctx)


class _Root(TyperGroup):
    """`edgelm` itself, with the commands of the table."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: LazyCommand(name, row)
            if isinstance(row, Command)
            else TyperGroup(
                name=name,
                help=row.help,
                commands={part: LazyCommand(part, below) for part, below in row.commands.items()},
                no_args_is_help=True,
            )
            for name, row in COMMANDS.items()
        }


app = typer.Typer(
    name="edgelm", cls=_Root, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def run_cli() -> int:
    """Run the command that `sys.argv` names; return the exit code. KeyboardInterrupt passes through."""
    try:
        code = app(standalone_mode=False)
    except usage.Exit as end:
        return end.exit_code
    except usage.Abort:
        raise KeyboardInterrupt from None
    except usage.TyperException as error:
        if message := one_line(error.format_message()).rstrip("."):  # none where a group's help was printed instead
            print(f"error: {message}; {_usage_hint()}", file=sys.stderr)
        return error.exit_code
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's own end: the reader, such as `head`, has enough
            return 0
        raise
    except EdgeLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE if isinstance(error, UsageError) else 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still buffered
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return code if isinstance(code, int) else 0


def _usage_hint() -> str:
    """Return what helps: `--` before a message that looks like a flag."""
    arguments = sys.argv[1:]
    like_flags = [word for word in arguments if word.startswith("-") and (" " in word or word[1:2].isdigit())]
    if like_flags and "--" not in arguments:
        return f"a text that begins with - stands behind --: -- {shlex.quote(one_line(like_flags[0]))}"
    return "see --help"


def _print_version(requested: bool) -> None:
    if requested:
        print(f"edgelm {__version__}")
        raise typer.Exit


def _main(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="The model: a name, a file, or a folder.", show_default=False)
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Chat with a model of that server.", show_default=False)] = None,
    api_key: EndpointKey = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="New chats begin with this preset.", show_default=False)
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Chat in plain lines: for a screen reader, or an Emacs shell.")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    *,
    flags: Annotated[Flags, SettingsOf("chat")],
) -> None:
    """Run a language model on your own machine. Without a command: chat with it in the terminal."""
    if context.invoked_subcommand is None:
        from edgelm.commands.chat import open_chat

        open_chat(endpoint, model, flags, api_key, preset=preset, plain=plain)


app.callback(invoke_without_command=True)(for_typer(_main))
