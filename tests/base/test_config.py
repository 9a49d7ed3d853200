"""Settings: each source beats the one before it, and what does not fit is one clear line that names its source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.base.config import Settings, load_config
from edgelm.base.errors import EdgeLMError
from edgelm.base.places import Places
from edgelm.base.setting_checks import split_scale


def places(folder: Path, text: str = "") -> dict[str, str]:
    (folder / "config.toml").write_text(text)
    return {"EDGELM_CONFIG_DIR": str(folder)}


def test_flags_beat_variables_beat_the_file_beat_the_defaults(tmp_path: Path) -> None:
    environment = places(tmp_path, "ctx = 1000\ntemperature = 1\nkv = 'int8'\n")
    environment |= {"EDGELM_CTX": "2000", "EDGELM_TEMPERATURE": "0.5", "EDGELM_UNKNOWN": "ignored"}
    config = load_config({"ctx": 3000, "top_k": None}, environment)
    assert config.settings == Settings(ctx=3000, temperature=0.5, kv="int8")
    assert config.sources["ctx"] == "--ctx"
    assert config.sources["temperature"] == "EDGELM_TEMPERATURE"
    assert config.sources["kv"] == str(tmp_path / "config.toml")
    assert config.sources["top_k"] == "default"


@pytest.mark.parametrize(
    ("text", "variables", "flags", "is_default"),
    [
        ("ctx = 4096", {}, {}, True),
        ("", {"EDGELM_CTX": "4096"}, {}, True),
        ("", {}, {"ctx": 4096}, False),
        ("ctx = 512\n[models.m]\nctx = 4096", {}, {}, False),
        ("[models.other]\nctx = 512", {"EDGELM_CTX": "4096"}, {}, True),
    ],
)
def test_a_context_is_for_every_model_or_for_this_one(
    tmp_path: Path, text: str, variables: dict[str, str], flags: dict[str, int], is_default: bool
) -> None:
    (tmp_path / "config.toml").write_text(text)
    settings = load_config(flags, {"EDGELM_CONFIG_DIR": str(tmp_path), **variables}).for_model("m").settings
    assert (settings.ctx, settings.ctx_is_default) == (4096, is_default)


def test_without_a_file_all_are_defaults(tmp_path: Path) -> None:
    config = load_config({}, {"EDGELM_CONFIG_DIR": str(tmp_path / "none")})
    assert config.settings == Settings()
    assert set(config.sources.values()) == {"default"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ctx = 0", ["ctx is 0", "at least 1"]),
        ("ctx = 1.5", ["ctx is 1.5"]),
        ("ctx = true", ["ctx is True"]),
        ("ctx = [1]", ["ctx is [1]"]),
        ("origin = ['foo']", ["origin is 'foo'", "give local, or origins"]),
        ("temperature = nan", ["temperature is nan"]),
        ("top_p = 0", ["top_p is 0"]),
        ("kv = 'q2'", ["kv is 'q2'", "one of auto, f16"]),
        ("colour = 'red'", ["no setting colour", "temperature"]),
        ("ctxx = 5", ["no setting ctxx; did you mean ctx?"]),
        ("ctx = ", ["not valid TOML"]),
        pytest.param("ctx = " + "1" * 5000, ["not valid TOML"], id="5000 digits"),
        pytest.param("ctx = " + "[" * 20_000, ["not valid TOML"], id="20000 brackets"),
        ("override_tensor = 'a{99999999999999999999}=CPU'", ["a regular expression"]),
        pytest.param(f"override_tensor = '{'(' * 3000}{')' * 3000}=CPU'", ["a regular expression"], id="3000 groups"),
        ("\udcff", ["not valid TOML"]),
    ],
)
def test_what_does_not_fit_names_its_file(tmp_path: Path, text: str, words: list[str]) -> None:
    environment = places(tmp_path)
    (tmp_path / "config.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(EdgeLMError) as caught:
        load_config({}, environment)
    for word in [*words, str(tmp_path / "config.toml")]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(EdgeLMError, match="cannot be read"):
        load_config({}, {"EDGELM_CONFIG_DIR": str(tmp_path)})


def test_adapters_and_their_strengths(tmp_path: Path) -> None:
    """A list in the file, several flags, or one text with commas; the part behind the last colon may be a number."""
    (tmp_path / "config.toml").write_text('lora = ["a", "b:0.5"]')
    environment = {"EDGELM_CONFIG_DIR": str(tmp_path)}
    assert load_config({}, environment).settings.lora == ("a", "b:0.5")
    assert load_config({}, environment | {"EDGELM_LORA": "c:2, d"}).settings.lora == ("c:2", "d")
    assert load_config({"lora": ["e,f:-1"]}, environment).settings.lora == ("e,f:-1",)
    assert [split_scale(text) for text in ("a", "C:/a:b", "a:.5", "a:-1e-1", ":3")] == [
        ("a", 1.0),
        ("C:/a:b", 1.0),
        ("a", 0.5),
        ("a", -0.1),
        (":3", 1.0),
    ]
    for wrong in ("a:nan", "a:1e4", "a:-inf"):
        with pytest.raises(EdgeLMError, match="a path, and perhaps a scale"):
            load_config({"lora": [wrong]}, environment)


@given(st.dictionaries(st.sampled_from([*Settings.__dataclass_fields__, "other"]), st.text(max_size=8)))
def test_any_text_in_a_flag_gives_settings_or_one_line(flags: dict[str, str]) -> None:
    error = settings = None
    try:
        settings = load_config(flags, {"EDGELM_CONFIG_DIR": "/nonexistent"}).settings
    except EdgeLMError as caught:
        error = caught
    if settings:
        assert settings.top_p is None or settings.top_p > 0
        assert settings.ctx is None or settings.ctx >= 1
    else:
        assert "\n" not in str(error)


def test_places_can_be_moved() -> None:
    moved = Places({"EDGELM_DATA_DIR": "/there", "HF_HUB_CACHE": "/hub"})
    assert moved.data == Path("/there")
    assert moved.hub == Path("/hub")
    assert Places({}).config.name == "edgelm"


def test_the_hub_is_where_its_own_client_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    assert Places({}).hub == Path("/home/me/.cache/huggingface/hub")
    assert Places({"HF_HOME": "$HOME/hf"}).hub == Path("/home/me/hf/hub")
    assert Places({"HF_HUB_CACHE": "${SCRATCH}/hub"}).hub == Path("/scratch/hub")
    assert Places({"HF_HUB_CACHE": "~/$SCRATCH"}).hub == Path("/home/me/scratch")
    assert Places({"XDG_CACHE_HOME": "$SCRATCH"}).hub == Path("/scratch/huggingface/hub")


@pytest.mark.parametrize("place", ["config", "data", "cache", "hub", "systemd_units"])
def test_a_user_without_a_home_gets_one_line(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with a number for a user."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(EdgeLMError) as error:
        getattr(Places({}), place)
    assert str(error.value) == (
        "there is no home folder: HOME is not set, and the system does not know this user; set HOME"
    )
    assert Places({"HF_HOME": "/hf"}).hub == Path("/hf/hub")
    assert isinstance(Places({}).ollama, list), "that of a service at most"
