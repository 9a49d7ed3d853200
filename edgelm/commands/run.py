"""`edgelm run`: print one answer on standard output, and everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from edgelm.base.config import SETTINGS, Config, load_config
from edgelm.base.errors import EdgeLMError, UsageError
from edgelm.base.passages import Passage
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.base.workers.messages import EFFORTS, Read, Result, RunJob, Said, Text, Thinking, Thought
from edgelm.chats.attachments import images
from edgelm.commands.flags import Flags, Json, SettingsOf, Verbose
from edgelm.commands.grammar import chosen_grammar
from edgelm.commands.job import reader_may_leave, run_job
from edgelm.commands.run_prompt import Words, parse_words
from edgelm.commands.running import model_or_served
from edgelm.library.local import model_config, require_sight
from edgelm.library.names import STARTER
from edgelm.library.projectors import find_projector

if TYPE_CHECKING:
    from edgelm.chats.presets import Preset
    from edgelm.commands.run_chat import SavedChat
    from edgelm.library.scan import LocalModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The flags that are no settings. None: not given."""

    go_on: Annotated[
        bool, typer.Option("-c", "--continue", help="Continue the last chat, with its model: edgelm run -c PROMPT.")
    ] = False
    chat: Annotated[
        str | None, typer.Option(metavar="ID", help="Continue this chat of `edgelm chats list`.", show_default=False)
    ] = None
    save: Annotated[bool, typer.Option("--save", help="Save it as a new chat.")] = False
    no_stdin: Annotated[bool, typer.Option("--no-stdin", help="Do not read standard input: in loops.")] = False
    raw: Annotated[bool, typer.Option("--raw", help="Complete the prompt as it is, without a chat template.")] = False
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text.", show_default=False)] = None
    schema: Annotated[
        str | None, typer.Option(metavar="FILE", help="Answer with JSON of this JSON schema.", show_default=False)
    ] = None
    json_object: Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")] = False
    regex: Annotated[str | None, typer.Option(help="Answer with text that this matches.", show_default=False)] = None
    choice: Annotated[
        list[str] | None, typer.Option(help="Answer with this text, or with another choice.", show_default=False)
    ] = None
    grammar: Annotated[
        str | None, typer.Option(metavar="FILE", help="Answer by this grammar, in GBNF or Lark.", show_default=False)
    ] = None
    think: Annotated[
        Thinking, typer.Option(help="How long to reason before the answer, where the model can.", show_default=False)
    ] = "auto"
    know: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Answer from this file or folder. May be repeated.", show_default=False),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Take system prompt and sampling from a preset.", show_default=False),
    ] = None


def run_model(
    model: Annotated[
        str | None,
        typer.Argument(help="starter, qwen3:4b, OWNER/NAME:QUANT, or a path; not needed with -c.", show_default=False),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PICTURE]… [PROMPT]",
            help="Files of pictures, - for one on standard input; the message, or with --raw the text to continue.",
            show_default=False,
        ),
    ] = None,
    *,
    options: RunOptions,
    as_json: Json = False,
    verbose: Verbose = False,
    flags: Annotated[Flags, SettingsOf("run")],
) -> None:
    """Print the answer to a prompt as it is decoded. Raises EdgeLMError.

    A chat that goes on has a model, which is used unless one is given.
    """
    grammar = chosen_grammar(
        schema=options.schema,
        json_object=options.json_object,
        regex=options.regex,
        choices=options.choice,
        grammar=options.grammar,
    )
    chat = options.chat or ("last" if options.go_on else None)
    words = parse_words([*filter(None, [model]), *(prompt or [])], has_chat=chat is not None)
    _check_flags(options, has_chat=chat is not None or options.save)
    if options.preset is not None and chat is not None:
        raise UsageError("--preset and --continue cannot be used together", "a chat keeps the preset it began with")
    config = load_config(flags)
    if remote := config.remote_model(words.model or ""):
        job = _remote_job(remote.name, words, grammar, options, config)
        from edgelm.commands.run_remote import remote_replies  # most answers come from this machine

        _print_answer(job, remote_replies(job, remote.name, config), None, as_json=as_json, verbose=verbose)
        return
    with _opened(config, chat, save=options.save) as saved:
        local = saved.choose_model(config) if saved and not words.model else model_or_served(words.model or "", config)
        job = _local_job(local, words, grammar, options, flags, model_config(local, config), saved, verbose=verbose)
        _print_answer(job, run_job(job, config.places, verbose), saved, as_json=as_json, verbose=verbose)


def _local_job(
    local: LocalModel,
    words: Words,
    grammar: GrammarSpec | None,
    options: RunOptions,
    flags: Flags,
    config: Config,
    saved: SavedChat | None,
    *,
    verbose: bool,
) -> RunJob:
    """Return the job for a model of this machine, and add the question to the chat."""
    preset, think = None, options.think
    if options.preset is not None:
        preset = _find_preset(options.preset, config, raw=options.raw)
        config, think = _with_preset(preset, config, think, is_saved=saved is not None)
    text, pictures = words.read(stdin=not options.no_stdin)
    if pictures:
        _require_pictures(local, config, raw=options.raw)
    settings, know = config.settings, tuple(options.know or ())
    if saved is not None:
        settings, think = saved.settings(settings, flags), saved.thinking(think)
        know = know or saved.knowledge
    passages: tuple[Passage, ...] | None = None
    quotes = False
    if know:
        from edgelm.commands.knowledge import find_passages  # most prompts need no SQLite

        passages = find_passages(know, text, config.places, verbose=verbose)
    elif local.name == STARTER and not options.raw:
        from edgelm.chats.knowledge import GUIDE
        from edgelm.commands.knowledge import read_guide

        know = (GUIDE,)
        passages, quotations = read_guide(text, config.places)
        if quotes := bool(quotations) and grammar is None:
            grammar = GrammarSpec("choice", json.dumps(quotations, ensure_ascii=False))
            settings = settings if flags.get("temperature") is not None else replace(settings, temperature=0.0)
    before, urls = _system(preset), images(pictures)
    if saved is not None:
        if preset is not None:
            from edgelm.chats.presets import apply_preset

            apply_preset(saved.session.chat, preset)
        sees = find_projector(config.settings, local.path) is not None
        before, text, urls = saved.ask(text, local, know, passages, pictures, sees=sees)
    return RunJob(
        model=local.path,
        settings=settings,
        prompt=text.lower() if quotes else text,  # capitals would change the starter's choice
        images=urls,
        before=before,
        stop=tuple(options.stop or ()),
        grammar=grammar,
        grammar_file=options.schema or options.grammar or "",
        think=think,
        passages=passages,
        raw=options.raw,
        prefixes=config.places.prefixes,
        drafts=True,
    )


def _remote_job(model: str, words: Words, grammar: GrammarSpec | None, options: RunOptions, config: Config) -> RunJob:
    """Return the job for a model that another server runs. Raises UsageError for what needs one here."""
    text, pictures = words.read(stdin=not options.no_stdin)
    for flag in ("raw", "know", "go_on", "chat", "save"):
        if getattr(options, flag):
            name = {"go_on": "continue"}.get(flag, flag)
            raise UsageError(f"--{name} cannot be used with {model}, which another server runs", "the chat can use it")
    preset, think = None, options.think
    if options.preset is not None:
        preset = _find_preset(options.preset, config, raw=False)
        config, think = _with_preset(preset, config, think, is_saved=False)
    return RunJob(
        model=Path(model),
        settings=config.settings,
        prompt=text,
        images=images(pictures),
        before=_system(preset),
        stop=tuple(options.stop or ()),
        grammar=grammar,
        think=think,
    )


def _system(preset: Preset | None) -> tuple[Said, ...]:
    return (Said("system", preset.system),) if preset and preset.system else ()


def _require_pictures(local: LocalModel, config: Config, *, raw: bool) -> None:
    if raw:
        raise UsageError("--raw and pictures cannot be used together", "pictures need the chat template")
    require_sight(local, config)


def _check_flags(options: RunOptions, *, has_chat: bool) -> None:
    """Raise UsageError for flags that need the chat template, beside --raw."""
    if not options.raw:
        return
    if has_chat:
        raise UsageError("--raw cannot be used with a chat", "a chat needs the chat template")
    if options.think != "auto":
        raise UsageError("--raw and --think cannot be used together", "a model reasons with its chat template only")
    if options.know:
        raise UsageError("--raw and --know cannot be used together", "put what the model should read into the prompt")


def _opened(config: Config, name: str | None, *, save: bool) -> AbstractContextManager[SavedChat | None]:
    """Open the chat that goes on, or a new one; None where nothing is saved."""
    if name is None and not save:
        return nullcontext()
    from edgelm.commands.run_chat import open_saved_chat  # most answers need no SQLite

    return open_saved_chat(config, name)


def _print_answer(
    job: RunJob,
    running: AbstractContextManager[Iterator[Any]],
    saved: SavedChat | None,
    *,
    as_json: bool,
    verbose: bool,
) -> None:
    """Print the answer of a job that `running` does, and add it to the chat."""
    output = _Output(sys.stdout)
    thoughts = _Output(sys.stderr, dim=True)
    with reader_may_leave(), _ended_line(output, thoughts), running as replies:
        for reply in replies:
            if saved is not None and isinstance(reply, Text | Thought):
                saved.append(reply)
            if isinstance(reply, Read):
                from edgelm.commands.knowledge import note_passages

                note_passages(reply, len(job.passages or ()))
            elif isinstance(reply, Thought) and thoughts.terminal and not as_json:
                thoughts.write(reply.text)
            elif isinstance(reply, Text) and not as_json:
                thoughts.end()
                output.write(reply.text)
            elif isinstance(reply, Result):
                if saved is not None:
                    saved.finish(reply.document)
                thoughts.end()
                chat = {"chat": saved.handle} if saved is not None else {}
                _finish(reply.document | chat, output, as_json, verbose)
                _note_end(reply.document)


def _find_preset(name: str, config: Config, *, raw: bool) -> Preset:
    """Return a preset without what flags say. Raises UsageError."""
    from edgelm.commands.presets import read_presets, start_preset  # most answers have none

    preset = start_preset(read_presets(config), name, config)
    assert preset is not None, "it is named"
    if raw and preset.system:
        raise UsageError("--raw and the system prompt of a preset cannot be used together", "put it into the prompt")
    return preset


def _with_preset(preset: Preset, config: Config, think: Thinking, *, is_saved: bool) -> tuple[Config, Thinking]:
    """Return the settings and the effort with those of a preset."""
    effort = preset.sampling.get("reasoning_effort")
    if effort is not None and think == "auto":
        think = EFFORTS[effort]
    own: dict[str, Any] = {key: value for key, value in preset.sampling.items() if key in SETTINGS}
    unused = [key for key in preset.sampling if key not in own and key != "reasoning_effort"]
    unused += ["tools"] if preset.tools else []
    if unused:
        words = "not used by edgelm run, but saved with the chat" if is_saved else "for the chat only"
        print(f"note: these values of the preset are {words}: {', '.join(unused)}", file=sys.stderr)
    return replace(config, settings=replace(config.settings, **own)), think


def _finish(result: dict[str, Any], output: _Output, as_json: bool, verbose: bool) -> None:
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        output.end()
    if verbose:
        usage, timings = result["usage"], result["timings"]
        print(
            f"prompt {usage['prompt_tokens']} tokens in {timings['prompt_ms']:.0f} ms, answer "
            f"{usage['completion_tokens']} tokens at {timings['decode_tokens_per_second']:.1f} tokens/s",
            file=sys.stderr,
        )


def _note_end(result: dict[str, Any]) -> None:
    """Say on standard error that the answer is incomplete."""
    usage = result["usage"]
    if result["finish_reason"] == "context":
        total = usage["prompt_tokens"] + usage["completion_tokens"]
        cause = f"the context of {total:,} tokens is full; raise --ctx"
    elif result["finish_reason"] == "length":
        cause = f"{usage['completion_tokens']:,} tokens are the limit; raise --max-tokens"
    else:
        return
    print(f"note: the answer is incomplete: {cause}", file=sys.stderr)


class _Output:
    """A stream for the text of a model. It must not move a terminal's cursor or write to its clipboard."""

    def __init__(self, stream: TextIO, *, dim: bool = False) -> None:
        self.terminal = stream.isatty()
        self._stream = stream
        self._dim = dim and self.terminal
        self._ended = True

    def write(self, text: str) -> None:
        if self.terminal:
            text = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
        self._stream.write(f"\x1b[2m{text}\x1b[22m" if self._dim else text)
        self._stream.flush()
        self._ended = text.endswith("\n")

    def end(self) -> None:
        if not self._ended:
            self.write("\n")


@contextmanager
def _ended_line(*outputs: _Output) -> Iterator[None]:
    """End the line of a terminal if the user or an error ends the block: a prompt or a message comes next."""
    try:
        yield
    except (KeyboardInterrupt, EdgeLMError):
        for output in outputs:
            if output.terminal:
                output.end()
        raise
