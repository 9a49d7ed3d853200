"""Files as attachments: what is read and refused, folders by git's rules, and whether a file has changed."""

from __future__ import annotations

import io
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from edgelm.base.errors import EdgeLMError
from edgelm.chats import attached_files, pdf
from edgelm.chats.attached_files import full_path, pasted, read_attachment, state_of
from edgelm.chats.attachments import Attachment
from edgelm.chats.export_md import to_markdown
from edgelm.chats.folders import Walk
from edgelm.chats.history import Chat, Message, Tree
from edgelm.chats.pdf import ReadPdf
from edgelm.chats.pdf_worker import read as read_pdf_here
from edgelm.tui.prompt.file_list import FileList
from edgelm.tui.prompt.pasted import existing_paths


def make_pdf(*pages: str, password: str = "") -> bytes:
    """Return a PDF with one line of text on each page; an empty text is a page without text."""
    writer = PdfWriter()
    font = DictionaryObject({
        NameObject("/Type"): NameObject("/Font"), NameObject("/Subtype"): NameObject("/Type1"),
        NameObject("/BaseFont"): NameObject("/Helvetica"),
    })  # fmt: skip
    for text in pages:
        page = writer.add_blank_page(300, 300)
        if text:
            content = DecodedStreamObject()
            content.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())
            page[NameObject("/Contents")] = writer._add_object(content)
            fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
            page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    stream = io.BytesIO()
    writer.write(stream)
    return stream.getvalue()


def refusal(path: Path) -> str:
    """Return the error for a file, which is one line."""
    with pytest.raises(EdgeLMError) as error:
        read_attachment(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_pdf_is_read_by_another_process(tmp_path: Path) -> None:
    file = tmp_path / "paper.bin"
    file.write_bytes(make_pdf("Hello", "", "World"))
    attachment, note = read_attachment(str(file))
    assert (attachment.text, attachment.media_type, note) == ("Hello\n\nWorld", "application/pdf", "")
    file.write_bytes(make_pdf("Hello", password="secret"))
    assert refusal(file) == "paper.bin is encrypted; save a copy without a password"


def test_a_pdf_that_takes_too_long(tmp_path: Path) -> None:
    file = tmp_path / "paper.pdf"
    file.write_bytes(make_pdf("Hello"))
    with pytest.raises(EdgeLMError, match=r"paper.pdf takes longer than 0 s to read"):
        pdf.read_pdf(str(file), "paper.pdf", limit_s=0.0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (make_pdf("", ""), "has no text, only pictures"),
        (make_pdf("Hello")[:200], "is damaged"),
        (b"%PDF-1.7\n" + bytes(1000), "is damaged"),
    ],
)
def test_pdfs_without_text(tmp_path: Path, data: bytes, reason: str) -> None:
    file = tmp_path / "x.pdf"
    file.write_bytes(data)
    with pytest.raises(EdgeLMError, match=reason):
        read_pdf_here(ReadPdf(str(file), 10, 1000))


def test_the_first_pages_of_a_long_pdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.pdf"
    file.write_bytes(make_pdf(*"abcde"))
    monkeypatch.setattr(attached_files, "read_pdf", lambda path, _: read_pdf_here(ReadPdf(path, 2, 1000)))
    attachment, note = read_attachment(str(file))
    assert attachment.text == "a\n\nb"
    assert note.startswith("only the first 2 of 5 pages are read")


PDF = make_pdf("Hello", "World")


@settings(max_examples=60, deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=300),
        st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.text(max_size=100).map(lambda text: text.encode("utf-16", "replace")),
        st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF1234WEBP", b"-----BEGIN PRIVATE KEY"]),
        st.tuples(st.integers(0, len(PDF)), st.integers(0, len(PDF)), st.binary(max_size=8)).map(
            lambda cut: PDF[: cut[0]] + cut[2] + PDF[cut[1] :]
        ),
    )
)
def test_any_bytes_are_read_or_refused_in_a_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "odd"
    file.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attached_files, "read_pdf", lambda path, _: read_pdf_here(ReadPdf(path, 10, 10_000)))
        try:
            attachment, _ = read_attachment(str(file))
        except EdgeLMError as error:
            message = str(error)
        else:
            message = ""
    assert "\n" not in message
    if message:
        return
    assert (attachment.kind == "image") == bool(attachment.data)
    assert not set(attachment.text) & {"\0", "\x1b", "\r"}
    assert state_of(attachment) == "same"


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_files, "MAX_TEXT_BYTES", 2**20)
    for name, data, words in (
        ("id_rsa", b"x", "may hold a key or a password"),
        (".npmrc", b"x", "may hold a key or a password"),
        ("notes.md", b"-----BEGIN RSA PRIVATE KEY-----\nabc", "holds a private key"),
        ("long.txt", b"x" * (2**20 + 1), "is larger than 1 MiB, the limit for texts"),
        ("x.docx", b"PK\3\4\0\0", "is neither text nor PDF nor a picture"),
    ):
        file = tmp_path / name
        file.write_bytes(data)
        assert words in refusal(file)
    (tmp_path / "link.txt").symlink_to(tmp_path / "id_rsa")
    assert "may hold a key" in refusal(tmp_path / "link.txt")
    (tmp_path / ".ssh").mkdir()
    assert "may hold a key" in refusal(tmp_path / ".ssh")
    assert "cannot be read: Not a directory" in refusal(tmp_path / "x.docx" / "y")
    assert refusal(tmp_path / "none").startswith("none does not exist")
    with pytest.raises(EdgeLMError, match="is no path"):
        full_path("\ud800")


def test_files_with_keys_of_programs_and_of_edgelm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELM_CONFIG_DIR", str(tmp_path / "moved"))
    secret = (
        "moved/config.toml", ".config/edgelm/config.toml", "share/tool_consents.json", ".envrc", "auth.json",
        ".terraformrc", ".vault_pass", "rclone.conf", ".config/gh/hosts.yml", "keys.json", ".cargo/credentials.toml",
    )  # fmt: skip
    for name in (*secret, "notes/config.toml", "notes/hosts.yml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"held by {name}")
    for name in secret:
        assert "may hold a key or a password" in refusal(tmp_path / name), name
    for folder in (".config/gh", "moved"):
        assert "has no text files" in refusal(tmp_path / folder)
    (tmp_path / "link").symlink_to(tmp_path / ".config" / "edgelm")
    assert "has no text files" in refusal(tmp_path / "link")
    text = read_attachment(str(tmp_path)).attachment.text
    assert "held by" in text
    assert [name for name in secret if f"held by {name}" in text] == []
    assert read_attachment(str(tmp_path / "notes" / "config.toml")).attachment.text == "held by notes/config.toml"


@pytest.mark.parametrize("name", ["/proc/self/environ", "/proc", "/sys/kernel", "/dev/null"])
def test_folders_of_the_system(tmp_path: Path, name: str) -> None:
    assert "lies in a folder of the system: it is not attached" in refusal(Path(name))
    (tmp_path / "link").symlink_to(name)
    assert "lies in a folder of the system" in refusal(tmp_path / "link")
    assert not [entry for entry in Walk("/", max_entries=50).entries() if entry.name in ("proc", "sys", "dev")]


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "a.py").write_text("a = 1")
    (folder / "deep" / "er" / "b.md").write_text("# B\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "secrets.json").write_text("{}")
    (folder / ".env").write_text("KEY=1")
    (folder / "link.txt").symlink_to("/etc/hosts")
    attachment, note = read_attachment(str(folder))
    assert attachment.text == "==> a.py <==\na = 1\n\n==> deep/er/b.md <==\n# B\n"
    assert attachment.name == "project/ (2 files)"
    assert note == "2 left out: not text, too large, or with keys"
    assert state_of(attachment) == "same"
    (folder / "c.py").write_text("c = 1")
    assert state_of(attachment) == "changed"
    monkeypatch.setattr(attached_files, "MAX_FOLDER_FILES", 2)
    assert read_attachment(str(folder)).note == "only the first 2 files"
    assert "has no text files" in refusal(folder / "empty")
    shutil.rmtree(folder)
    assert state_of(attachment) == "gone"
    assert state_of(pasted("text", 1)) == "same"


NAMES = ("a", "b", "build", "foo", "x.py", "y.log", "keep.txt", "Z z")
ATOMS = (
    "a", "b", "build", "foo", "*.py", "*.log", "keep.txt", "*", "**", "f?o", "[ab]", "x.py", "Z\\ z", "*o*o*", "b**d",
    "*i*l*", "[!a-f]*", "[[:upper:]]?z", "[z-a]", "[]a]", "\\a", "*p.t*t", "a\\", "k*.*",
)  # fmt: skip


@pytest.mark.skipif(shutil.which("git") is None, reason="git is the specification")
def test_gitignore_as_git_reads_it(tmp_path: Path) -> None:
    rng = random.Random(7)

    def pattern() -> str:
        body = "/".join(rng.choice(ATOMS) for _ in range(rng.choice((1, 1, 1, 2, 2, 3))))
        begin, anchor, end = rng.random() < 0.3, rng.random() < 0.25, rng.random() < 0.3
        line = f"{'!' if begin else ''}{'/' if anchor else ''}{body}{'/' if end else ''}"
        return line + rng.choice(("", "", " ", "\r"))

    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for number in range(25):  # each tree in a folder of one repository
        root = tmp_path / str(number)
        folders = [root]
        root.mkdir()
        for _ in range(10):
            folder = rng.choice(folders) / rng.choice(NAMES)
            if not folder.exists():
                folder.mkdir()
                folders.append(folder)
        for _ in range(25):
            file = rng.choice(folders) / rng.choice(NAMES)
            if not file.exists():
                file.write_text("x")
        for folder in sorted({root, *rng.sample(folders, min(3, len(folders)))}):
            lines = ["# a comment", *(pattern() for _ in range(rng.randint(1, 4)))]
            (folder / ".gitignore").write_text("\n".join(lines))
    paths = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.glob("[0-9]*/**/*"))]
    paths = [path for path in paths if not path.endswith(".gitignore")]
    answer = subprocess.run(
        ["git", "check-ignore", "--no-index", "-z", "--stdin"], input="\0".join(paths) + "\0", cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    excluded = set(answer.stdout.split("\0"))
    walked = {f"{number}/{entry.name}" for number in range(25) for entry in Walk(str(tmp_path / str(number))).entries()}
    assert walked == set(paths) - excluded
    assert len(walked) > 100
    assert len(excluded) > 100


HARD = """
import sys
from edgelm.chats.folders import Walk
print(*(entry.name[:9] for entry in Walk(sys.argv[1], hidden=True).entries()))
"""


def test_no_pattern_holds_the_list_up(tmp_path: Path) -> None:
    deep = tmp_path / "/".join("a" * 100)
    deep.mkdir(parents=True)
    (deep / ("a" * 120)).write_text("x")
    (tmp_path / ("a" * 120)).write_text("x")
    lines = (
        "*a" * 5 + "*b",
        "*a" * 60 + "*b",
        "**/" * 20 + "b",
        "**/a/" * 20 + "b",
        "/*a*a" * 20 + "*b",
        "**a" * 9 + "b",
    )
    (tmp_path / ".gitignore").write_text("\n".join((*lines, " " * 100_000 + "x", "*" * 100_000 + "b", "last.txt")))
    (tmp_path / "last.txt").write_text("x")
    command = [sys.executable, "-c", HARD, tmp_path]  # one match that does not end holds all threads of its process
    names = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert names[:3] == [".gitignor", "a", "a" * 9]
    assert len(names) == 3 + 99 + 1, "the last line still excludes"


def test_rules_above_a_folder_and_of_a_clone(tmp_path: Path) -> None:
    (tmp_path / "sub" / "dist").mkdir(parents=True)
    (tmp_path / "sub" / "dist" / "made.txt").write_text("x")
    (tmp_path / "sub" / "a.tmp").write_text("x")
    (tmp_path / "sub" / "b.own").write_text("x")
    (tmp_path / "sub" / "c.py").write_text("x")
    (tmp_path / ".gitignore").write_text("dist/\n*.tmp\n")

    def names(folder: str) -> list[str]:
        return [entry.name for entry in Walk(str(tmp_path / folder)).entries()]

    assert names("sub") == ["a.tmp", "b.own", "c.py", "dist", "dist/made.txt"], "outside of a repository"
    (tmp_path / ".git" / "info").mkdir(parents=True)
    (tmp_path / ".git" / "info" / "exclude").write_text("*.own\n")
    assert names("sub") == ["c.py"]
    assert names("sub/dist") == ["made.txt"], "a folder that the user names"


def test_the_list_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("src/chat/store.py", "src/store_thread.py", "docs/history.md", ".github/store.yml", "Store.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    files = FileList()

    def listed(word: str) -> list[str]:
        return [suggestion.text for suggestion in files.matches(word)]

    assert listed("") == ["Store.txt", "docs/", "src/", "docs/history.md", "src/chat/", "src/store_thread.py",
                          "src/chat/store.py"]  # fmt: skip
    assert listed("store") == ["Store.txt", "src/chat/store.py", "src/store_thread.py"]
    assert listed("sthr") == ["src/store_thread.py"]
    assert listed("chst") == ["docs/history.md", "src/chat/store.py"]
    assert listed("src/") == ["src/", "src/chat/", "src/chat/store.py", "src/store_thread.py"]
    assert listed(".gi") == [".github/", ".github/store.yml"]
    assert listed("xyz") == []
    assert listed(f"{tmp_path}/s") == [f"{tmp_path}/src/", f"{tmp_path}/Store.txt"][::-1]
    assert listed("/no/such/") == []
    monkeypatch.setenv("HOME", str(tmp_path))
    assert listed("~/do") == ["~/docs/"]
    assert listed("~") == ["~/"]


def test_pasted_paths(tmp_path: Path) -> None:
    file = tmp_path / "two words.txt"
    file.write_text("x")
    escaped = str(file).replace(" ", "\\ ")
    for text in (str(file), f"'{file}'", f"{escaped} ", f"file://{str(file).replace(' ', '%20')}\n", f'"{file}"'):
        assert existing_paths(text) == [str(file)]
    assert existing_paths(f"{escaped} '{tmp_path}'") == [str(file), str(tmp_path)]
    for text in (f"{file} is here", "two words.txt", "'/etc", "/etc/\0", "", "/" + "x" * 5000):
        assert existing_paths(text) == []


def test_an_export_has_the_texts_as_the_model_got_them() -> None:
    chat = Chat(title="Adding")
    code = Attachment(kind="text", name="a.py", text="a = 1\n")
    picture = Attachment(kind="image", name="plot.png", data=b"\x89PNG", media_type="image/png")
    tree = Tree([Message(chat=chat.id, parent=None, role="user", text="Explain", attachments=(code, picture))])
    expected = "# Adding\n\n## You\n\na.py:\n```\na = 1\n```\n\n*plot.png (a picture)*\n\nExplain\n"
    assert to_markdown(chat, tree) == expected
