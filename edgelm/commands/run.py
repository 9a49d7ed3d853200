"""`edgelm run`: print one answer on standard output, and everything else on standard error."""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from edgelm.base.config import SETTINGS, Config, load_config
from edgelm.base.errors import EdgeLMError, RequestError, UsageError
from edgelm.base.places import Places
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.base.workers.messages import EFFORTS, Passage, Read, Result, RunJob, Said, Text, Thinking, Thought
from edgelm.chats.attachments import Attachment, images
from edgelm.chats.presets import Preset, apply_preset
from edgelm.commands.grammar import chosen_grammar
from edgelm.commands.job import reader_may_leave, run_job
from edgelm.commands.presets import read_presets, start_preset
from edgelm.commands.run_options import RunOptions
from edgelm.library.local import model_config, require_sight, runnable_model
from edgelm.library.names import STARTER

if TYPE_CHECKING:
    from edgelm.commands.run_chat import SavedChat
    from edgelm.library.scan import LocalModel

MAX_INPUT_BYTES = 64 * 2**20
STDIN = "-"
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
SILENT_S = 1.0  # a pipe beside a prompt may be silent this long before a line says so


def run_model(
    words: Sequence[str], options: RunOptions, flags: Mapping[str, object], *, as_json: bool, verbose: bool
) -> None:
    """Print the answer to a prompt as it is decoded.

    `words` are the model, files of pictures and the prompt. A chat that goes on has a model, which is used unless one
    is given. Raises EdgeLMError.
    """
    grammar = chosen_grammar(
        schema=options.schema,
        json_object=options.json_object,
        regex=options.regex,
        choices=options.choice,
        grammar=options.grammar,
    )
    chat = options.chat or ("last" if options.go_on else None)
    raw, think, know = options.raw, options.think, tuple(options.know or ())
    model, prompt, paths = _parted(words, has_chat=chat is not None)
    _check_flags(options, has_chat=chat is not None or options.save)
    if options.preset is not None and chat is not None:
        raise UsageError("--preset and --continue cannot be used together", "a chat keeps the preset it began with")
    config = load_config(flags)
    if remote := config.remote_model(model or ""):
        text, pictures = _read_prompt(prompt, paths, stdin=not options.no_stdin)
        job = _remote_job(remote.name, text, pictures, grammar, options, config)
        from edgelm.commands.run_remote import remote_replies  # most answers come from this machine

        _print_answer(job, remote_replies(job, remote.name, config), None, as_json=as_json, verbose=verbose)
        return
    with _opened(config, chat, save=options.save) as saved:
        local = saved.choose_model(config) if saved and not model else runnable_model(model or "", config)
        config = model_config(local, config)
        chosen = None if options.preset is None else _find_preset(options.preset, config, raw=raw)
        if chosen is not None:
            config, think = _with_preset(chosen, config, think, is_saved=saved is not None)
        text, pictures = _read_prompt(prompt, paths, stdin=not options.no_stdin)
        if pictures:
            _require_pictures(local, config, raw=raw)
        settings = config.settings
        if saved is not None:
            settings, think = saved.settings(settings, flags), saved.thinking(think)
            know = know or saved.knowledge
        passages: tuple[Passage, ...] | None = None
        if know:
            from edgelm.commands.knowledge import find_passages  # most prompts need no SQLite

            passages = find_passages(know, text, config.places, verbose=verbose)
        elif local.name == STARTER and not raw:
            from edgelm.chats.knowledge.index import GUIDE

            know = (GUIDE,)
            passages, quotations = _read_guide(text, config.places)
            if quotations and grammar is None:
                grammar = GrammarSpec("choice", json.dumps(quotations, ensure_ascii=False))
                settings = settings if flags.get("temperature") is not None else replace(settings, temperature=0.0)
        urls = images(pictures)
        before: tuple[Said, ...] = (Said("system", chosen.system),) if chosen and chosen.system else ()
        if saved is not None:
            if chosen is not None:
                apply_preset(saved.session.chat, chosen)
            before, text, urls = saved.ask(text, local, know, passages, pictures)
            if not pictures and (urls or any(said.images for said in before)):
                require_sight(local, config)
        job = RunJob(
            model=local.path,
            settings=settings,
            prompt=text,
            images=urls,
            before=before,
            stop=tuple(options.stop or ()),
            grammar=grammar,
            grammar_file=options.schema or options.grammar or "",
            think=think,
            passages=passages,
            raw=raw,
            prefixes=config.places.prefixes,
            drafts=True,
        )
        _print_answer(job, run_job(job, config.places, verbose), saved, as_json=as_json, verbose=verbose)


def _remote_job(
    model: str,
    prompt: str,
    pictures: Sequence[Attachment],
    grammar: GrammarSpec | None,
    options: RunOptions,
    config: Config,
) -> RunJob:
    """Return the job for a model that another server runs. Raises UsageError for what needs one here."""
    for flag in ("raw", "know", "go_on", "chat", "save"):
        if getattr(options, flag):
            name = {"go_on": "continue"}.get(flag, flag)
            raise UsageError(f"--{name} cannot be used with {model}, which another server runs", "the chat can use it")
    think = options.think
    before: tuple[Said, ...] = ()
    if options.preset is not None:
        preset = _find_preset(options.preset, config, raw=False)
        config, think = _with_preset(preset, config, think, is_saved=False)
        before = (Said("system", preset.system),) if preset.system else ()
    return RunJob(
        model=Path(model),
        settings=config.settings,
        prompt=prompt,
        images=images(pictures),
        before=before,
        stop=tuple(options.stop or ()),
        grammar=grammar,
        think=think,
    )


def _parted(words: Sequence[str], *, has_chat: bool) -> tuple[str | None, str | None, list[str]]:
    """Return the model, the prompt and the pictures among the arguments. Raises UsageError.

    A picture is `-`, standard input, or a word that ends like the name of one; where a chat goes on, it may come first.
    """
    if not words and not has_chat:
        raise UsageError("Missing argument 'MODEL'", "see --help; only a chat that goes on has a model of its own")
    first = [] if has_chat else list(words[:1])
    rest = words[len(first) :]
    pictures = [word for word in rest if _is_picture_name(word)]
    texts = [*first, *(word for word in rest if not _is_picture_name(word))]
    if len(texts) > 2:
        raise UsageError(f"Got unexpected extra argument ({texts[2]})", "put quotes around the prompt")
    if has_chat and len(texts) < 2:
        return None, next(iter(texts), None), pictures  # a single argument is the prompt
    return next(iter(texts), None), texts[1] if len(texts) > 1 else None, pictures


def _is_picture_name(word: str) -> bool:
    return word == STDIN or (word.lower().endswith(PICTURE_ENDINGS) and (" " not in word or Path(word).exists()))


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
                _note_passages(reply, len(job.passages or ()))
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


def _read_guide(question: str, places: Places) -> tuple[tuple[Passage, ...] | None, list[str]]:
    """Return passages of the guide for the starter, and its possible answers; None: the guide cannot be searched."""
    from edgelm.chats.knowledge.starter import starter_answers
    from edgelm.commands.knowledge import find_starter_passages

    try:
        passages = find_starter_passages(question, places)
    except EdgeLMError as error:
        print(f"note: the guide is not read: {error}", file=sys.stderr)
        return None, []
    return passages, starter_answers(passages, question)


def _note_passages(read: Read, num_found: int) -> None:
    """Name the passages that the model reads, on standard error."""
    if read.passages:
        names = ", ".join(f"{number} {passage.name}" for number, passage in enumerate(read.passages, 1))
    elif num_found:
        names = "nothing: the context has no room; raise --ctx"
    else:
        names = "nothing: no passage fits the question"
    print(f"read: {names}", file=sys.stderr)


def _read_prompt(prompt: str | None, paths: Sequence[str], *, stdin: bool) -> tuple[str, tuple[Attachment, ...]]:
    """Return the argument, piped standard input (`stdin`), or both with an empty line between them; and the pictures.

    A picture on standard input takes the place of `-`, or comes last.
    """
    parts = [prompt] if prompt else []
    piped: list[Attachment] = []
    if (stdin or STDIN in paths) and not sys.stdin.isatty():
        if prompt and STDIN not in paths and not _gives_something(sys.stdin):
            print(
                "note: waiting for standard input, an open pipe; < /dev/null or --no-stdin reads none", file=sys.stderr
            )
        raw = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        if len(raw) > MAX_INPUT_BYTES:
            raise RequestError(f"standard input is longer than {MAX_INPUT_BYTES // 2**20} MiB", "shorten it")
        try:
            if raw:
                from edgelm.chats.attached_files import is_picture, picture_of  # most prompts are an argument alone

                if is_picture(raw):
                    piped.append(picture_of(raw, "standard input"))
                else:
                    parts.append(raw.decode())
        except UnicodeDecodeError as error:
            raise RequestError(
                f"standard input is not valid UTF-8 (byte 0x{raw[error.start]:02x} at {error.start})",
                "convert it first",
            ) from None
    pictures: list[Attachment] = []
    for path in paths:
        if path != STDIN:
            pictures.append(_read_picture(path))
        elif piped:
            pictures.append(piped.pop())
        elif len(parts) == bool(prompt):  # no text either
            raise RequestError("standard input is empty", "pipe a picture into it, or omit the -")
    pictures += piped
    if not parts and not pictures:
        raise RequestError("the prompt is empty", "give it as an argument or on standard input")
    return "\n\n".join(parts), tuple(pictures)


def _read_picture(path: str) -> Attachment:
    from edgelm.chats.attached_files import full_path, read_attachment

    attachment, _ = read_attachment(full_path(path))
    if attachment.kind != "image":
        raise RequestError(f"{attachment.name} is not a picture", "--know answers from texts and PDFs")
    return attachment


def _gives_something(stream: TextIO) -> bool:
    """Return whether a stream has bytes or its end within SILENT_S; a file always has."""
    try:
        return bool(select.select([stream], [], [], SILENT_S)[0])
    except (OSError, ValueError):  # not a stream of the system
        return True


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
