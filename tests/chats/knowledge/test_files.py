"""Which files are read, what their text is, and what is left out."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.chats.knowledge import files
from edgelm.chats.knowledge.files import Root
from edgelm.chats.knowledge.index import Knowledge
from edgelm.chats.knowledge.plain_text import plain_text
from edgelm.chats.knowledge.secret_files import is_secret_name
from tests.chats.knowledge.conftest import Write

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtz\n"


def read(root: Path | str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the texts of a root, and the reasons of what is left out."""
    with closing(Root(str(root))) as opened:
        contents = {file.name: opened.read(file) for file in opened.files()}
        reasons = dict(opened.left_out)
    texts = {}
    for name, content in contents.items():
        if content is not None and content.reason:
            reasons[name] = content.reason
        elif content is not None:
            texts[name] = content.text
    return texts, reasons


def test_the_text_files_of_a_folder_are_read_upper_folders_first(folder: Path, write: Write) -> None:
    for name in ("z.md", "a/b/c.py", "a/README", "é ü.txt"):
        write(name, f"text of {name}")
    texts, reasons = read(folder)
    assert list(texts) == ["z.md", "é ü.txt", "a/README", "a/b/c.py"]
    assert texts["a/README"] == "text of a/README"
    assert not reasons


def test_a_root_may_be_one_file(write: Write) -> None:
    path = write("a.md", "text")
    write("b.md", "other")
    assert read(path) == ({"a.md": "text"}, {})


def test_a_root_in_the_home_folder(write: Write, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.md", "text")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert read("~/notes") == ({"a.md": "text"}, {})


@pytest.mark.parametrize("root", ["", "missing", "~nobody-has-this-name/x", "a\0b", "\udcff"])
def test_a_root_that_does_not_exist_is_an_error_with_a_hint(root: str) -> None:
    with pytest.raises(EdgeLMError) as raised:
        Root(root)
    assert raised.value.hint


# -- what must never be read ---------------------------------------------------------------------------------------


def test_a_link_is_not_followed_out_of_the_folder(folder: Path, write: Write) -> None:
    outside = folder.parent / "outside.md"
    outside.write_text("outside")
    write("a.md", "inside")
    (folder / "link.md").symlink_to(outside)
    (folder / "relative.md").symlink_to("../outside.md")
    (folder / "up").symlink_to("..", target_is_directory=True)
    texts, reasons = read(folder)
    assert texts == {"a.md": "inside"}
    assert reasons == dict.fromkeys(("link.md", "relative.md", "up"), "a symbolic link")


def test_links_in_a_circle_end(folder: Path, write: Write) -> None:
    write("sub/a.md", "inside")
    (folder / "sub" / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "self").symlink_to("self")
    assert read(folder)[0] == {"sub/a.md": "inside"}


def test_a_link_to_a_secret_inside_is_not_read(folder: Path, write: Write) -> None:
    write(".env", "PASSWORD=1")
    (folder / "plain.txt").symlink_to(".env")
    assert read(folder)[0] == {}


def test_a_file_that_becomes_a_link_before_it_is_opened_is_not_read(folder: Path, write: Write) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "a.md").write_text("outside")
    write("sub/a.md", "inside")
    write("b.md", "inside")
    with closing(Root(str(folder))) as opened:
        found = {file.name: file for file in opened.files()}
        (folder / "sub").rename(folder.parent / "moved")
        (folder / "sub").symlink_to(outside, target_is_directory=True)
        (folder / "b.md").unlink()
        (folder / "b.md").symlink_to(outside / "a.md")
        for name in ("sub/a.md", "b.md"):
            content = opened.read(found[name])
            assert content is not None
            assert content.text == ""
            assert content.reason


def test_a_root_that_is_itself_a_link_is_what_the_user_named(folder: Path, write: Write) -> None:
    write("a.md", "text")
    (folder.parent / "link").symlink_to(folder, target_is_directory=True)
    assert read(folder.parent / "link")[0] == {"a.md": "text"}


def test_hidden_files_and_folders_are_not_read(folder: Path, write: Write) -> None:
    for name in (".env", ".netrc", ".git/config", "a/.hidden/b.md", ".a.md", "node_modules/x/README.md"):
        write(name, "hidden")
    assert read(folder) == ({}, {})


@pytest.mark.parametrize(
    "name",
    "server.pem api.key id_rsa id_ed25519.pub Credentials.json credentials aws-credentials.csv vault.kdbx netrc "
    "prod.env env.local cert.p12 secrets.yaml SECRET.txt passwords.md my-password.txt service-account-1.json "
    "github_token.token terraform.tfstate bash_history htpasswd key.asc x.gpg".split(),
)
def test_files_with_the_name_of_a_secret_are_not_read(folder: Path, write: Write, name: str) -> None:
    path = write(name, "text")
    assert read(folder) == ({}, {name: files.IS_PRIVATE})
    assert read(path) == ({}, {name: files.IS_PRIVATE})


@pytest.mark.parametrize(
    "name", "secret_files.py token.py tokens.rs password-reset.md keys.md environment.md keyboard.txt env.py".split()
)
def test_a_page_or_code_about_secrets_is_none(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "content",
    [
        KEY,
        "\n\n" + KEY,
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nabc",
        "-----BEGIN PRIVATE KEY-----",
        "PuTTY-User-Key-File-3: ssh-ed25519",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n",
        "$ANSIBLE_VAULT;1.1;AES256\n",
        "Notes\n\n" + KEY,
        "Notes\r\n  -----BEGIN RSA PRIVATE KEY-----\r\nDEK-Info: AES\r\n\r\n" + "A" * 64,
        ("\ufeff" + KEY).encode(),
        KEY.encode("utf-16"),
        KEY.replace("\n", "\r"),
        json.dumps({"type": "service_account", "private_key": KEY}),
        json.dumps([KEY.replace("\n", "\r\n")]),
        f'KEY = """{KEY}"""',
    ],
)
def test_a_file_with_a_private_key_is_not_read(folder: Path, write: Write, content: str | bytes) -> None:
    write("notes.txt", content)
    assert read(folder) == ({}, {"notes.txt": files.IS_PRIVATE})


def test_a_page_that_shows_how_a_key_begins_is_read(folder: Path, write: Write) -> None:
    write("keys.md", "A key begins so:\n\n    -----BEGIN PRIVATE KEY-----\n    ...\n")
    assert list(read(folder)[0]) == ["keys.md"]


@pytest.mark.parametrize("name", [".ssh", ".gnupg", ".aws"])
def test_a_folder_of_keys_cannot_be_knowledge(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "inner").mkdir(parents=True)
    (tmp_path / name / "inner" / "config").write_text("x")
    for root in (tmp_path / name, tmp_path / name / "inner" / "config"):
        with pytest.raises(EdgeLMError, match="may hold a key"):
            Root(str(root))


@pytest.mark.timeout(30)
def test_pipes_sockets_and_devices_are_not_opened(folder: Path, knowledge: Knowledge) -> None:
    os.mkfifo(folder / "pipe.md")
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(folder)
        try:
            listener.bind("socket.md")  # a path that is not too long
        finally:
            os.chdir(here)
        assert read(folder) == ({}, dict.fromkeys(("pipe.md", "socket.md"), "not a regular file"))
        for root in (folder / "pipe.md", folder / "socket.md", Path("/dev/zero")):
            with pytest.raises(EdgeLMError, match="not a regular file"):
                knowledge.refresh([str(root)])


@pytest.mark.timeout(30)
def test_a_file_that_becomes_a_pipe_before_it_is_opened_is_not_waited_for(folder: Path, write: Write) -> None:
    path = write("a.md", "text")
    with closing(Root(str(folder))) as opened:
        (file,) = opened.files()
        path.unlink()
        os.mkfifo(path)
        content = opened.read(file)
    assert content is not None
    assert content.reason == "not a regular file"


# -- limits --------------------------------------------------------------------------------------------------------


def test_limits_of_files_and_bytes_are_told(folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("large.txt", "a" * 2_001)
    for number in range(5):
        write(f"{number}.txt", "b" * 1_000)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 2_000)
    texts, reasons = read(folder)
    assert (len(texts), list(reasons)) == (5, ["large.txt"])
    monkeypatch.setattr(files, "MAX_FILES", 3)
    texts, reasons = read(folder)
    assert (list(texts), reasons) == (["0.txt", "1.txt", "2.txt"], {str(folder): "only the first 3 files are read"})
    monkeypatch.setattr(files, "MAX_TOTAL_BYTES", 2_500)
    texts, reasons = read(folder)
    assert (list(texts), list(reasons)) == (["0.txt", "1.txt"], [str(folder)])


def test_the_walk_through_a_huge_folder_ends(folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        write(f"{number:02}/{number}.txt", "text")
    write("top.txt", "text")
    monkeypatch.setattr(files, "MAX_ENTRIES", 40)
    texts, reasons = read(folder)
    assert len(texts) == 10
    assert list(reasons) == [str(folder)]


def test_an_unreadable_file_is_named(folder: Path, write: Write) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    write("a.md", "text").chmod(0)
    write("b/c.md", "text").parent.chmod(0)
    try:
        assert read(folder) == ({}, {"a.md": "Permission denied", "b/": "Permission denied"})
    finally:
        (folder / "b").chmod(0o700)


def test_a_folder_whose_names_alone_may_be_read_is_named(
    folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a folder has the mode r--; the system's answers are given here, since root may read everything."""
    write("a.md", "text")
    write("b/c.md", "text")
    with closing(Root(str(folder))) as opened, monkeypatch.context() as patched:
        scan = os.scandir
        patched.setattr(os, "scandir", lambda path: unreadable(scan(path)))
        assert list(opened.files()) == []
        assert opened.left_out == [("a.md", "Permission denied"), ("b", "Permission denied")]
    with closing(Root(str(folder))) as opened, monkeypatch.context() as patched:
        patched.setattr(opened, "_open", denied)
        assert list(opened.files()) == []
        assert opened.left_out == [(str(folder), "Permission denied")]


def denied(*_: object, **__: object) -> NoReturn:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def unreadable(scan: AbstractContextManager[Iterator[os.DirEntry[str]]]) -> Iterator[list[SimpleNamespace]]:
    with scan as entries:
        yield sorted((SimpleNamespace(name=entry.name, stat=denied) for entry in entries), key=lambda e: e.name)


# -- texts ---------------------------------------------------------------------------------------------------------


def test_binary_files_are_left_out(folder: Path, write: Write) -> None:
    write("a.pdf", "%PDF-1.7 text")
    write("b.txt", b"text\0text")
    write("c", bytes(range(1, 32)) * 4)
    assert read(folder) == ({}, dict.fromkeys(("a.pdf", "b.txt", "c"), "not a text file"))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfa\r\nb\rc\n", "a\nb\nc\n"),
        ("Grüße".encode("utf-16"), "Grüße"),
        ("Grüße".encode("utf-16-be"), None),
        (b"\xfe\xff" + "Grüße".encode("utf-16-be"), "Grüße"),
        ("Grüße".encode("cp1252"), "Grüße"),
        ("Grüße, äöü, äöü, äöü".encode() + b"\xff", "Grüße, äöü, äöü, äöü\ufffd"),
        (b"\x1b[31mred\x1b[0m\x07 bell" + b"." * 100, "red bell" + "." * 100),
        (b"", ""),
        ("a\U000e0041b\U0001f600".encode(), "ab\U0001f600"),  # letters that no screen shows, and that a model reads
    ],
)
def test_encodings(data: bytes, text: str | None) -> None:
    assert plain_text(data) == text


def test_a_name_that_cannot_be_shown_is_left_out(folder: Path, write: Write) -> None:
    write("a\nb.md", "text")
    with suppress(OSError, UnicodeError):  # macOS refuses names that are no UTF-8
        (folder / "\udcff.md").write_text("text")
    texts, reasons = read(folder)
    assert not texts
    assert "'a\\nb.md'" in reasons


def test_a_file_that_is_written_all_the_time_is_left_out(folder: Path, write: Write) -> None:
    path = write("a.log", "line\n")
    reading = files._read

    def growing(descriptor: int) -> bytes:
        data = reading(descriptor)
        with path.open("a") as file:
            file.write("line\n")
        return data

    with closing(Root(str(folder))) as opened, pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "_read", growing)
        (file,) = opened.files()
        content = opened.read(file)
    assert content is not None
    assert content.reason == "it changed while it was read"


def test_a_file_that_is_replaced_while_it_is_read_is_whole(folder: Path, write: Write) -> None:
    path = write("a.md", "old" * 1_000)
    stop = threading.Event()

    def replace() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            other = folder.parent / "new"
            other.write_text(("old", "new")[number % 2] * 1_000)
            other.replace(path)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(200):
            for text in read(folder)[0].values():
                assert text in ("old" * 1_000, "new" * 1_000)
    finally:
        stop.set()
        thread.join()
