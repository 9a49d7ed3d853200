"""The settings of a front that are checked before it listens."""

from __future__ import annotations

import pytest

from edgelm.base.config import Settings
from edgelm.server.serving import ServeOptions, _keys


@pytest.mark.parametrize(("secret", "warned"), [("2short4", True), ("é" * 20, True), ("long enough", False)])
def test_a_key_that_is_easily_guessed_is_warned_of(secret: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    (key,) = _keys(Settings(api_key=secret), ServeOptions([]))
    assert key.secret == secret
    assert ("--api-key" in caplog.text) is warned
    assert secret not in caplog.text
