"""doctor's line `upgrade`: it fits how edgelm was installed, and from what."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgelm.commands import doctor_upgrade
from edgelm.commands.doctor_upgrade import Origin, installed_from, upgrade_command

PIPX, UV, VENV = "/home/a/.local/share/pipx/venvs/edgelm", "/home/a/.local/share/uv/tools/edgelm", "/home/a/venv"
PIP = "/home/a/venv/bin/python -m pip"
PACKAGE, FOLDER, URL = Origin(), Origin("/src/my edgelm"), "git+https://git.example/edgelm@main"
REPOSITORY = Origin(repository=URL)


@pytest.mark.parametrize(
    ("prefix", "origin", "command"),
    [
        (PIPX, PACKAGE, "pipx upgrade edgelm"),
        (PIPX, FOLDER, "git pull in /src/my edgelm, then pipx runpip edgelm install --upgrade '/src/my edgelm'"),
        (
            PIPX,
            REPOSITORY,
            f"pipx runpip edgelm install --force-reinstall --no-deps {URL} && pipx runpip edgelm install {URL}",
        ),
        (UV, PACKAGE, "uv tool upgrade edgelm"),
        (UV, FOLDER, "git pull in /src/my edgelm, then uv tool upgrade edgelm --reinstall-package edgelm"),
        (UV, REPOSITORY, "uv tool upgrade edgelm"),
        (VENV, PACKAGE, f"{PIP} install --upgrade edgelm"),
        (
            VENV,  # on no index, "--upgrade edgelm" is satisfied with what is there
            FOLDER,
            f"git pull in /src/my edgelm, then {PIP} install --upgrade '/src/my edgelm'",
        ),
        (VENV, REPOSITORY, f"{PIP} install --force-reinstall --no-deps {URL} && {PIP} install {URL}"),
        (VENV, Origin("/src", editable=True), "git pull in /src"),
        ("/opt/homebrew/Cellar/edgelm/0.4/libexec", PACKAGE, "brew upgrade edgelm"),
        ("/nix/store/abc-edgelm", PACKAGE, "this installation is Nix's: update its input"),
    ],
)
def test_how_to_upgrade_is_judged_by_the_installation(prefix: str, origin: Origin, command: str) -> None:
    assert upgrade_command(Path(prefix), origin) == command


GIT = {"url": "https://git.example/edgelm", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


@pytest.mark.parametrize(
    ("record", "origin"),
    [
        ({}, Origin()),
        ({"url": "file:///home/a/my%20edgelm", "dir_info": {}}, Origin("/home/a/my edgelm")),
        ({"url": "file:///src", "dir_info": {"editable": True}}, Origin("/src", editable=True)),
        ({"url": "file:///src/edgelm-0.6.0-py3-none-any.whl", "archive_info": {}}, Origin()),
        (GIT, Origin(repository="git+https://git.example/edgelm")),
        (
            GIT | {"vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": "abc"}, "subdirectory": "b"},
            Origin(repository="git+https://git.example/edgelm@main#subdirectory=b"),
        ),
    ],
)
def test_what_edgelm_was_installed_from_is_found(
    record: dict[str, Any], origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = SimpleNamespace(read_text=lambda _: json.dumps(record))
    monkeypatch.setattr(doctor_upgrade, "distribution", lambda _: installed)
    assert installed_from() == origin
