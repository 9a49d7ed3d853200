"""The guide says what is true: its lists are the code's, and every command, flag, key and setting in it exists."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer import exceptions as usage

from edgelm.base.config import MODEL_SETTINGS, SETTINGS, Settings, load_config
from edgelm.base.model_tables import OWN_KEYS, REMOTE_KEYS
from edgelm.chats.knowledge import files, guide
from edgelm.chats.knowledge.index import KEPT_DAYS
from edgelm.chats.tools.settings import parse_servers
from edgelm.commands.cli import app
from edgelm.commands.presets import read_looks, read_presets
from edgelm.library.catalog import entries
from edgelm.server.api.dialects import COUNTS, DIALECTS, POOLED, TEXTS
from edgelm.server.engines.memory import ROOM_LIMIT_S
from edgelm.server.keys import MIN_KEY_LEN
from edgelm.server.routes.admin import START_LIMIT_S
from edgelm.tui.commands.table import COMMANDS, KEY_GROUPS
from edgelm.tui.dialogs.params import parse_params

ROOT = Path(__file__).parent.parent
MAX_SECTION_LEN = 1000  # characters: a small model reads several at a time
NUM_SECTIONS = range(60, 220)
# pip's, uv's, and Docker's
OTHERS_FLAGS = {"--extra-index-url", "--find-links", "--pip-args", "--force-reinstall", "--no-binary", "--gpus"}
OTHERS_VARIABLES = {
    "TRITON_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "XDG_CONFIG_HOME",
}
OTHERS_NAMES = {  # words with an underscore that are no setting of ours
    "check_embedding_ctx_length", "endpoint_fim", "model_fim", "finish_reason", "reasoning_content",
    "previous_response_id", "context_length_exceeded", "relevance_score",
    "image_url", "input_image", "tool_result",
}  # fmt: skip
DOCUMENTS = [  # by the guide's rules for commands
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *(ROOT / name for name in ("README.md", "docs/agents.md", "docs/editors.md", "docs/gpu.md")),
]
CATALOGUE = {f"{entry.family}{size}" for entry in entries() for size in ("", f":{entry.size}")}
MARKED = {  # commands of the documents that no test runs, and why
    ("", "--install-completion"): "typer's own: it writes into the files of a shell",
    ("run", "--verbose"): "llama.cpp's own log; a test runs it with serve",
    ("service install", "--linger"): "the managers' own tests install with it",
    ("service logs", ""): "it becomes journalctl or tail, whose commands are compared",
    ("service logs", "--follow"): "as above",
}
HOST = f"host.docker.internal:{Settings().port}/v1"  # docs/editors.md names host and port apart
COMMAND_LINE: Any = typer.main.get_command(app)
DOES_ITS_WORK_AT_ONCE = {"--install-completion"}  # while it is parsed

sys.path.insert(0, str(ROOT / "packaging"))
guide_pages: Any = __import__("guide_pages")


def outside_fences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Return the code spans of a text; a line break in one is a space."""
    prose = re.sub(r"^    .*$", "", outside_fences(text), flags=re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]


def fences(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> Iterator[str]:
    """Yield what a reader would type: code spans, and lines of indented blocks without their comments."""
    for line in re.findall(r"^    (edgelm\b.*)$", outside_fences(text), flags=re.MULTILINE):
        yield line.split("  #")[0].split(" # ")[0].strip()
    for span in spans(text):
        if span == "edgelm" or span.startswith("edgelm "):
            yield span


def require_valid(line: str) -> None:
    """Raise AssertionError or EdgeLMError for a command that edgelm would refuse; nothing is run."""
    words = shlex.split(re.split(r" [<>|] ", line)[0].replace("|unload", "").replace("…", "TEXT"))[1:]
    if not words or words[0] == "COMMAND" or "[" in line or {*words} & DOES_ITS_WORK_AT_ONCE:
        return
    command, context = COMMAND_LINE, typer.Context(COMMAND_LINE, info_name="edgelm")
    while getattr(command, "commands", None) and words and not words[0].startswith("-"):
        name = words.pop(0)
        assert name in command.commands, line
        command = command.commands[name]
        context = typer.Context(command, info_name=name, parent=context)
    if getattr(command, "commands", None) and not words:
        return  # a group, `edgelm service`
    try:
        context = command.make_context(context.info_name, words, parent=context.parent)
    except usage.Exit:
        return  # --help
    except usage.TyperException as error:
        message = error.format_message()
        if "Missing" not in message or (words and not words[0].startswith("-")):  # a text may name a command alone
            raise AssertionError(f"{line}: {message}") from None
        return
    own = "chat" if command is COMMAND_LINE else context.info_name
    load_config({name: value for name, value in context.params.items() if own in commands_with(name)})


def commands_with(setting: str) -> frozenset[str]:
    return frozenset(SETTINGS[setting].commands) if setting in SETTINGS else frozenset()


EVERY_FLAG = {
    flag
    for command in [COMMAND_LINE, *guide_pages.all_commands(COMMAND_LINE)]
    for parameter in command.get_params(typer.Context(command))
    for flag in (*parameter.opts, *parameter.secondary_opts)
}


def test_the_lists_of_the_guide_are_those_of_the_code() -> None:
    for path, text in guide_pages.guide_pages().items():
        assert path.read_text(encoding="utf-8") == text, "run python packaging/guide_pages.py"


def test_the_topics_are_the_pages_of_the_folder() -> None:
    assert sorted(guide.TOPICS) == sorted(path.stem for path in (ROOT / "docs" / "guide").iterdir())
    for topic, text in guide.pages():
        assert text.startswith("# "), topic
        assert "<!--" not in text, topic
        assert guide.summary(topic).endswith("."), topic


def test_a_section_is_a_passage_that_a_small_model_can_read() -> None:
    sections = guide.sections()
    assert len(sections) in NUM_SECTIONS
    assert len({section.title.casefold() for section in sections}) == len(sections)
    for section in sections:
        assert len(section.title) + len(section.text) < MAX_SECTION_LEN, section.title
        assert not section.text.startswith(("    ", "```", "- ", "#")), section.title


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_command_in_a_document_is_one_that_edgelm_takes(path: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("EDGELM_CONFIG_DIR", str(tmp_path))
    for line in command_lines(path.read_text(encoding="utf-8")):
        require_valid(line)


def documented(line: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the command of a line with each of its flags, "" without any."""
    words = shlex.split(line.replace("…", "TEXT"))[1:]
    names = tuple(itertools.takewhile(re.compile("[a-z]+").fullmatch, words[:2]))
    if names and not getattr(COMMAND_LINE.commands.get(names[0]), "commands", None):
        names = names[:1]  # what follows is an argument
    flags = {word.partition("=")[0] for word in words if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
    yield from ((names, flag) for flag in flags or {""})


def test_every_command_in_a_document_is_run_by_a_test_or_marked() -> None:
    """Each command with each of its flags, as far as the quoted words of a test's file tell."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    texts = [text.replace("serving(", '"serve"') for text in texts]  # tests/server/harness.py runs it
    files = [({*re.findall(r'"([a-z]+)"', text)}, {*re.findall(r'"(--?[a-z-]+)', text)}) for text in texts]
    pairs = {pair for path in DOCUMENTS for line in command_lines(path.read_text()) for pair in documented(line)}
    missing = {
        (" ".join(names), flag)
        for names, flag in pairs
        if not any({*names} <= quoted and (not flag or flag in flags) for quoted, flags in files)
    }
    assert missing == set(MARKED)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_flag_and_variable_in_a_document_exists(path: Path) -> None:
    for span in spans(path.read_text(encoding="utf-8")):
        if not span.startswith(("edgelm", "pipx", "uv", "hf", "python", "export")):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span):
                assert flag in EVERY_FLAG | OTHERS_FLAGS, span
        for variable in re.findall(r"EDGELM_[A-Z_]+[A-Z]", span):
            name = variable.removeprefix("EDGELM_").lower()
            assert name in SETTINGS or variable in variables_of_the_code() or variable == "EDGELM_NAME", span


def variables_of_the_code() -> set[str]:
    folders = {f"EDGELM_{kind}_DIR" for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME")}
    return folders | {"EDGELM_AGENT_KEY"}


def test_every_name_of_the_guide_exists() -> None:
    """Settings, fields, routes, chat commands, keys and models in code spans."""
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    keys = {part for _, group in KEY_GROUPS for key in group for part in key.shown.split(", ")}
    chat = {command.name for command in COMMANDS}
    routes = server_routes()
    families = {entry.family for entry in entries()} | {"starter"}
    models = {f"{entry.family}:{entry.size}" for entry in entries()}
    for topic, text in guide.pages():
        for span in spans(text):
            if match := re.fullmatch(r"/([a-z]+)(?: .*)?", span):
                assert match[1] in chat or span in routes, (topic, span)
            elif span.startswith("/") and len(span) > 1:
                assert span.startswith("//") or span in routes or span.split()[0][1:] in chat, (topic, span)
            elif re.fullmatch(r"[a-z]+(_[a-z]+)+", span):
                known = span in SETTINGS or span in OWN_KEYS or f"`{span}`" in api or span in OTHERS_NAMES
                assert known, (topic, span)
            elif re.fullmatch(r"(Ctrl|Alt|Shift)\+\S+|F\d+", span):
                assert span in keys, (topic, span)
            elif re.fullmatch(r"[A-Z][A-Z]+(_[A-Z]+)+", span) and not span.startswith("EDGELM"):
                assert span in OTHERS_VARIABLES, (topic, span)
        for family, size in re.findall(r"(?<![\w:/.])([a-z][a-z0-9.-]*):(\d[\w.-]*b)(?![\w/])", text):
            if "ollama:" + family not in text:
                assert f"{family}:{size}" in models, (topic, family, size)
        for model in re.findall(r"^    edgelm (?:pull|run|embed) ([a-z][\w.-]*)(?=\s|$)", text, flags=re.MULTILINE):
            assert model in families, (topic, model)


def server_routes() -> set[str]:
    """Return the paths of the front: those of its tables, and those that its modules name."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "edgelm" / "server").rglob("*.py"))
    return {*DIALECTS, *COUNTS, *TEXTS, *POOLED, *re.findall(r'Route\("(/[^"{]*)"', sources)}


def test_every_parameter_that_the_guide_sets_in_a_chat_is_one() -> None:
    for _, text in guide.pages():
        for span in spans(text):
            if span.startswith("/params ") and "[" not in span:
                assert parse_params(span.removeprefix("/params "), {})


def test_every_example_of_the_settings_file_is_accepted(tmp_path: Path) -> None:
    examples = [(topic, example) for topic, text in guide.pages() for example in fences(text, "toml")]
    examples += [("README", example) for example in fences((ROOT / "README.md").read_text(encoding="utf-8"), "toml")]
    assert examples
    for topic, example in examples:
        (tmp_path / "config.toml").write_text(example, encoding="utf-8")
        config = load_config({}, {"EDGELM_CONFIG_DIR": str(tmp_path)})
        changed = [name for name, source in config.sources.items() if source != "default"]
        assert changed or config.models or config.tables, topic
        read_presets(config)
        read_looks(config)
        parse_servers(config.tables.get("tools", {}), "config.toml")
        for table in tomllib.loads(example).get("models", {}).values():
            own = {"alias", "endpoint", *REMOTE_KEYS} if "endpoint" in table else {*MODEL_SETTINGS, *OWN_KEYS}
            assert set(table) <= own, topic


def gigabytes(name: str) -> str:
    (entry,) = (entry for entry in entries() if f"{entry.family}:{entry.size}" == name)
    return f"{entry.nbytes / 1e9:.1f}"


@pytest.mark.parametrize(
    ("topic", "title", "said"),
    [
        ("serve", "Start the server", f"http://{Settings().host}:{Settings().port}/v1"),
        ("serve", "Load, unload or keep a model", f"({Settings().idle_timeout:g} by default"),
        ("serve", "How requests wait", f"up to {Settings().parallel} requests at the same time"),
        ("serve", "Use API keys", f"at least {MIN_KEY_LEN} characters"),
        ("serve", "How requests wait", f"{START_LIMIT_S / 60:.0f} minutes, of which up to {ROOM_LIMIT_S / 60:.0f} for"),
        ("knowledge", "Files that are not read as knowledge", f"files over {files.MAX_FILE_BYTES // 2**20} MiB"),
        ("knowledge", "Files that are not read as knowledge", f"{files.MAX_FILES:,} files or"),
        ("knowledge", "Files that are not read as knowledge", f"or {files.MAX_TOTAL_BYTES // 2**20} MiB"),
        ("knowledge", "Where knowledge goes", f"not used for {KEPT_DAYS} days"),
        ("memory", "What the context is, and how to make it longer", "at most 8192 tokens"),
        ("troubleshooting", "The disk is full", f"up to {Settings().prefix_cache_disk:g} GiB"),
        ("start", "Choose a first model", f"`qwen3:4b` ({gigabytes('qwen3:4b')} GB)"),
        ("start", "Choose a first model", f"`qwen3:0.6b` ({gigabytes('qwen3:0.6b')} GB)"),
    ],
)
def test_a_number_in_the_text_is_that_of_the_code(topic: str, title: str, said: str) -> None:
    assert said in " ".join(section_of(topic, title).split())


def test_the_default_context_is_that_of_the_help() -> None:
    assert "at most 8192" in SETTINGS["ctx"].help


def test_every_address_names_the_port_of_the_server() -> None:
    for path in DOCUMENTS:
        for port in re.findall(r"(?:127\.0\.0\.1|host\.docker\.internal):(\d+)", path.read_text(encoding="utf-8")):
            assert int(port) == Settings().port, path.name


def test_no_example_asks_the_starter_by_an_api() -> None:
    """Only the chat and `edgelm run` add the passages that it quotes."""
    for path in sorted((ROOT / "docs" / "guide").glob("*.md")):
        assert not re.search(r'model"?[=:] ?"starter"', path.read_text(encoding="utf-8")), path.name


def test_the_readme_has_the_routes_and_the_installation_of_the_guide() -> None:
    """What stands in both is the same."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = "\n".join(re.findall(r"^\| (`/.*?) \|", readme, flags=re.MULTILINE))
    listed = "\n".join(re.findall(r"^- (`/.*?):", guide.page("apis"), flags=re.MULTILINE))
    assert spans(table) == spans(listed)
    for topic, title in (("start", "Install edgelm"), ("gpu", "Use an NVIDIA GPU")):
        for line in re.findall(r"^    (\S.*)$", section_of(topic, title), flags=re.MULTILINE):
            assert f"    {line}" in readme, title
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    least, end = re.findall(r"3\.(\d+)", requires)
    for text in (readme, guide.page("start")):
        assert f"Python 3.{least} to 3.{int(end) - 1}" in " ".join(text.split())


@pytest.mark.parametrize("topic", ["agents", "editors"])
def test_a_short_page_repeats_its_long_one(topic: str) -> None:
    """Addresses, other programs' settings and measured numbers of docs/TOPIC.md."""
    long = (ROOT / "docs" / f"{topic}.md").read_text(encoding="utf-8")
    for span in spans(guide.page(topic)):
        if re.match(r"http://|[\w.-]+[._][\w.]+$|none$", span) and span not in CATALOGUE:
            assert span.removeprefix("http://") in long.replace("`host.docker.internal`", HOST), span
    for number in re.findall(r"about (\d[\d,]+)", guide.page(topic)):
        assert number in long


def section_of(topic: str, title: str) -> str:
    (section,) = (section for section in guide.sections() if (section.topic, section.title) == (topic, title))
    return section.text


def test_the_readme_links_to_the_pages_and_every_link_leads_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(docs/guide/([\w-]+)\.md\)", text))
    assert {"start", "chat", "models", "troubleshooting"} < linked <= set(guide.TOPICS)
    assert "](docs/guide)" in text  # the folder has the others
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", path.read_text(encoding="utf-8")):
            assert os.path.exists(path.parent / target), (path.name, target)  # noqa: PTH110


def test_every_measured_result_is_cited() -> None:
    places = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")]
    places += [ROOT / "packaging" / "README.md", ROOT / "tests" / "order.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in places)
    for path in (ROOT / "docs" / "results").iterdir():
        if path.name.startswith("soak-"):  # `make soak` writes it while this test runs
            continue
        assert path.name in text, f"{path.name} is cited nowhere: cite it, or remove it with what is newer"


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("context is full", "The context is full"),
        ("port in use", "The port is in use"),
        ("remove a model", "Remove a model and free disk space"),
        ("api key", "Use API keys"),
        ("GPU not used", "The GPU is not used"),
        ("download interrupted", "A download was interrupted"),
        ("out of memory", "Out of memory: the model does not fit"),
    ],
)
def test_words_find_the_section_that_answers(words: str, title: str) -> None:
    assert title in [section.title for section in guide.find_sections(words)]


def test_words_that_no_section_has_find_nothing() -> None:
    assert guide.find_sections("xylophone") == []
    assert guide.find_sections("") == []
