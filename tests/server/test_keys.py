"""API keys: key files are private, headers of clients have them, and easily guessed ones are warned of."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.datastructures import Headers

from edgelm.base.config import Settings
from edgelm.base.errors import UsageError
from edgelm.server.keys import Key, Keys, read_key_file
from edgelm.server.serving import ServeOptions, _keys


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_key_file_has_names_and_rights(tmp_path: Path) -> None:
    path = key_file(tmp_path, "# our keys\neditor sk-aaaaaaaa\n\nme sk-bbbbbbbb admin\nsk-cccccccc\n")
    assert read_key_file(path) == [
        Key("editor", "sk-aaaaaaaa"),
        Key("me", "sk-bbbbbbbb", admin=True),
        Key("key 5", "sk-cccccccc"),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no key"),
        ("# nothing\n", "has no key"),
        ("a short\n", "shorter than 8"),
        ("a sk-äöüäöüäö\n", "not printable ASCII"),
        ("sk-aaaaaaaa admin\n", "line 1 of .* without a name for it; write a line"),
        ("a sk-aaaaaaaa root\n", "line 1 of .* has more than a name, a key and `admin`"),
        ("a sk-aaaaaaaa\na sk-bbbbbbbb\n", "line 2 of"),
        ("a sk-aaaaaaaa\nb sk-aaaaaaaa\n", "repeats"),
    ],
)
def test_a_wrong_key_file_is_refused_by_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        read_key_file(key_file(tmp_path, text))
    assert "sk-aaaaaaaa" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match="others can read"):
        read_key_file(key_file(tmp_path, "a sk-aaaaaaaa\n", mode))


def test_a_link_or_a_folder_is_no_key_file(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(key_file(tmp_path, "a sk-aaaaaaaa\n"))
    with pytest.raises(UsageError, match="symbolic link"):
        read_key_file(link)
    with pytest.raises(UsageError, match="not a file of yours"):
        read_key_file(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_key_file(tmp_path / "missing")


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"Authorization": "Bearer one-secret"}, "one"),
        ({"authorization": "bearer  two-secret "}, "two"),
        ({"X-Api-Key": "two-secret"}, "two"),
        ({"Authorization": "Basic one-secret"}, None),
        ({"Authorization": "Bearer one-secre"}, None),
        ({"Authorization": "Bearer "}, None),
        ({}, None),
    ],
)
def test_a_key_is_found_in_the_headers_of_both_dialects(headers: dict[str, str], name: str | None) -> None:
    keys = Keys([Key("one", "one-secret"), Key("two", "two-secret")])
    key = keys.find(Headers(headers))
    assert (key.name if key else None) == name


def test_a_key_is_not_shown_and_has_a_namespace_of_its_own() -> None:
    one, two = Key("one", "one-secret"), Key("two", "two-secret")
    assert "secret" not in repr(one).replace("secret=", "")
    assert one.cache_namespace != two.cache_namespace
    assert "secret" not in one.cache_namespace


def test_a_log_names_a_key_and_not_the_key() -> None:
    key = Key("one", "one-secret", admin=True)
    assert key.label == f"one ({key.cache_namespace[:8]}, admin)"


def test_the_users_own_commands_share_what_requests_without_a_key_share() -> None:
    assert Key("this user", "one-secret", of_user=True).cache_namespace == ""


@pytest.mark.parametrize(("secret", "warned"), [("2short4", True), ("é" * 20, True), ("long enough", False)])
def test_a_key_that_is_easily_guessed_is_warned_of(secret: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    (key,) = _keys(Settings(api_key=secret), ServeOptions([]))
    assert key.secret == secret
    assert ("--api-key" in caplog.text) is warned
    assert secret not in caplog.text
