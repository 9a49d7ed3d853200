"""A text is split into passages that together are the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgelm.base.passages import Passage
from edgelm.chats.knowledge.passages import MAX_CHARS, MAX_FENCE_CHARS, split_text

MARKUP = "text|# One|## Two ##|### |Title|=====|-----|---|```|```sh|~~~~|- a|    # code|def f():|class A:|@w|[t]|k: 1"
LINES = st.one_of(
    st.sampled_from([*MARKUP.split("|"), "", "", "", " ", "x" * 700, "a b " * 800]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=40),
)
NAMES = st.sampled_from("a.md a.rst a.py a.c a.toml a.yaml a.txt README a.sh a.sql guide".split())


def headings(name: str, text: str) -> list[str]:
    return [passage.heading for passage in split_text(name, text)]


@given(NAMES, st.lists(LINES, max_size=60))
def test_passages_are_the_text_in_its_order(name: str, lines: list[str]) -> None:
    passages = split_text(name, "\n".join(lines))
    again = [line for passage in passages for line in passage.text.split("\n") if line.strip()]
    if all(len(line) <= MAX_CHARS for line in lines):
        assert again == [line for line in lines if line.strip()]
    assert "".join("".join(again).split()) == "".join("".join(lines).split())
    for passage in passages:
        assert passage.text.strip()
        assert len(passage.text) <= MAX_FENCE_CHARS
        if "```" not in passage.text and "~~~" not in passage.text:
            assert len(passage.text) <= MAX_CHARS


def test_a_passage_is_named_by_its_headings() -> None:
    text = "# edgelm\n\nIntro.\n\n## Install\n\nText.\n\n### From a *checkout* ###\n\nMore.\n\n## Use\n\nEnd.\n"
    assert [passage.name for passage in split_text("README.md", text)] == [
        "README.md › edgelm",
        "README.md › Install",
        "README.md › Install › From a checkout",
        "README.md › Use",
    ]


def test_two_headings_of_the_highest_level_are_no_title() -> None:
    assert headings("a.md", "# A\n\n## B\n\nx\n\n# C\n\n## D\n\ny") == ["A › B", "C › D"]


def test_a_heading_without_text_stands_with_the_next_section() -> None:
    assert split_text("a.md", "# A\n\n## B\n\nx\n\n## C") == [
        Passage("a.md", "B", "# A\n\n## B\n\nx"),
        Passage("a.md", "C", "## C"),
    ]


def test_underlined_headings() -> None:
    assert headings("a.md", "One\n===\n\nx\n\nTwo\n---\n\ny\n") == ["One", "Two"]


def test_what_looks_like_an_underlined_heading() -> None:
    for text in ("- item\n---\n", "a\nb\n---\n", "a | b\n--- | ---\n1 | 2", "> quote\n---\n", "x\n\n---\n\ny\n"):
        assert headings("a.md", text) == [""], text
    assert headings("a.md", "---\ntitle: x\n---\n\n# A\n\ny") == ["", "A"]


def test_headings_in_code_are_none() -> None:
    text = "# A\n\n```sh\n# a comment\nB\n===\n```\n\n    # indented\n\n~~~\n## C\n```\n~~~\n\n#hash\n"
    assert headings("a.md", text) == ["A"]
    assert headings("a.md", "````\n```\n# no\n````\n# A\nx") == ["", "A"]


def test_a_code_fence_is_not_split() -> None:
    code = "```\n" + "line of code\n\n" * 100 + "```"
    passages = split_text("a.md", "# A\n\n" + "words " * 150 + f"\n\n{code}\n\nbehind\n")
    assert any(code in passage.text for passage in passages)
    assert len(passages) == 3


def test_a_huge_fence_is_split_at_its_lines() -> None:
    lines = [f"line {number}" for number in range(2_000)]
    passages = split_text("a.md", "\n".join(["```", *lines, "```"]))
    assert "\n".join(passage.text for passage in passages).split("\n")[1:-1] == lines


def test_restructured_text() -> None:
    text = "======\nManual\n======\n\nx\n\nInstall\n=======\n\ny\n\nFrom a wheel\n------------\n\nz\n\n"
    text += "Use\n===\n\n::\n\n    code\n"
    assert headings("a.rst", text) == ["Manual", "Install", "Install › From a wheel", "Use"]
    assert headings("a.rst", "text\n\n----------\n\nmore") == [""]
    assert headings("a.rst", "A long title\n===\n\nx") == [""]


def test_code_by_its_definitions() -> None:
    python = "import os\n\nA = 1\n\n\n# about f\n@cached\ndef f():\n    class X: ...\n\n\nclass B:\n    x = 1\n"
    assert [(p.heading, p.text.split("\n")[0]) for p in split_text("a.py", python)] == [
        ("", "import os"),
        ("def f", "# about f"),
        ("class B", "class B:"),
    ]
    assert headings("a.rs", "pub(crate) fn run() {\n}\n\nimpl Foo for B {\n}") == ["fn run", "impl Foo"]
    assert headings("a.go", "func (s *Server) Run() {\n}") == ["func (s *Server) Run"]
    assert headings("a.c", "#include <x.h>\n\nstatic int run(int a)\n{\n}\n\nint declared(void);\n") == ["", "run"]
    assert headings("a.ts", "export const run = async (a) => {\n}\n") == ["run"]
    assert headings("a.sh", "set -e\n\nbuild() {\n  make\n}\n") == ["", "build"]
    assert headings("a.toml", "x = 1\n[tool.ruff] # y\nline = 1\n") == ["", "tool.ruff"]
    assert headings("Makefile", "A := 1\n\ntest: build\n\tpytest\n") == ["", "test"]


def test_plain_text_is_split_at_paragraphs() -> None:
    text = "\n\n".join(f"# {number} " + "word " * 60 for number in range(20))
    passages = split_text("notes.txt", text)
    assert {passage.heading for passage in passages} == {""}
    assert all(passage.text.startswith("# ") for passage in passages)
    assert all(MAX_CHARS / 2 < len(passage.text) <= MAX_CHARS for passage in passages)


def test_a_huge_line_is_cut_at_spaces() -> None:
    passages = split_text("a.txt", "word " * 1_000_000)
    assert len(passages) < 5_000
    assert all(passage.text.startswith("word") for passage in passages)
    assert len(split_text("a.md", "#" * 2_000_000)) < 2_000


def test_an_empty_text_has_no_passages() -> None:
    for name in ("a.md", "a.rst", "a.py", "a.txt"):
        for text in ("", "\n\n", " \n\t\n"):
            assert split_text(name, text) == []
