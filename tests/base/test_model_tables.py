"""Settings of one model in config.toml: which source beats which, other names, and one line for each mistake."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgelm.base.config import Config, load_config
from edgelm.base.errors import EdgeLMError
from edgelm.commands.cli import app
from edgelm.library.local import installed_model, model_config
from tests.tiny import write_tiny

TABLES = """
ctx = 1000
temperature = 0.5
[models."qwen3:4b"]
ctx = 2000
kv = "int8"
temperature = 0.1
alias = ["gpt-4o", "coder"]
keep_alive = "30m"
[models.other]
keep_alive = -1
alias = "small"
"""


def config(folder: Path, text: str = TABLES, flags: dict[str, object] | None = None, **variables: str) -> Config:
    (folder / "config.toml").write_text(text)
    return load_config(flags or {}, {"EDGELM_CONFIG_DIR": str(folder), "HF_HOME": str(folder / "hf")} | variables)


def test_a_models_own_settings_beat_those_for_all(tmp_path: Path) -> None:
    own = config(tmp_path).for_model("Qwen3:4B")
    assert (own.settings.ctx, own.settings.kv, own.settings.temperature) == (2000, "int8", 0.1)
    assert own.sources["ctx"] == f'{tmp_path / "config.toml"} [models."qwen3:4b"]'
    others = config(tmp_path).for_model("another")
    assert (others.settings.ctx, others.settings.kv, others.settings.temperature) == (1000, "auto", 0.5)


def test_variables_and_flags_beat_a_models_own_settings(tmp_path: Path) -> None:
    own = config(tmp_path, flags={"ctx": "3000"}, EDGELM_TEMPERATURE="0.9").for_model("qwen3:4b")
    assert (own.settings.ctx, own.settings.kv, own.settings.temperature) == (3000, "int8", 0.9)


def test_keep_alive_and_aliases(tmp_path: Path) -> None:
    read = config(tmp_path)
    assert [read.keep_alive_of(name) for name in ("qwen3:4b", "other", "none")] == [1800, math.inf, None]
    assert [read.model_name(name) for name in ("CODER", "small", "none")] == ["qwen3:4b", "other", "none"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[models.a]\ncontext = 5", ["a model has no setting context", "ctx", 'models."a"']),
        ("[models.a]\nkeepalive = '5m'", ["no setting keepalive; did you mean keep_alive?"]),
        ("[models.a]\nport = 5", ["no setting port; port is a setting of the whole server: write it above the tables"]),
        ("[models.a]\nmax_memory = 5", ["no setting max_memory; max_memory is a setting of the whole server"]),
        ("[models.a]\nmax_models = 5", ["no setting max_models; max_models is a setting of the whole server"]),
        ("[models.a]\nprefix_cache_disk = 5", ["prefix_cache_disk is a setting of the whole server"]),
        ("[models.a]\napi_key_file = 'k'", ["no setting api_key_file; it needs an endpoint"]),
        ("[models.a]\nctx = 0", ['models."a"', "ctx is 0", "at least 1"]),
        ("[models.a]\nkeep_alive = 'soon'", ["keep_alive is 'soon'", "5m"]),
        ("[models.a]\nalias = 3", ["alias is 3", "a name"]),
        ("[models.a]\nalias = 'x'\n[models.b]\nalias = ['X']", ["alias 'X'", "'a'"]),
        ("[models.a]\nalias = 'B'\n[models.b]\nalias = 'a'", ["alias 'B'", "'b'"]),
        ("models = 3", ["models is no table"]),
        ("[models]\na = 3", ["models.a is no table"]),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(EdgeLMError) as error:
        config(tmp_path, text)
    for word in [*words, str(tmp_path / "config.toml")]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_an_alias_is_a_name_for_the_commands(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write_tiny(tmp_path / "models" / "tiny.gguf")
    read = config(tmp_path, f"model_dirs = ['{tmp_path / 'models'}']\n[models.tiny]\nctx = 77\nalias = 'my model'\n")
    model = installed_model("my model", read)
    assert model.name == "tiny"
    assert model_config(model, read).settings.ctx == 77


def test_edgelm_config_shows_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config(tmp_path)
    monkeypatch.setenv("EDGELM_CONFIG_DIR", str(tmp_path))
    document = json.loads(CliRunner().invoke(app, ["config", "--json"]).stdout)
    assert document["models"]["qwen3:4b"] == {
        "alias": ["gpt-4o", "coder"],
        "keep_alive": "30m",
        "ctx": 2000,
        "kv": "int8",
        "temperature": 0.1,
    }
    assert document["models"]["other"] == {"alias": ["small"], "keep_alive": "-1"}
    assert "keep_alive = 30m, ctx = 2000" in CliRunner().invoke(app, ["config"]).stdout


def test_show_prints_the_template_of_a_models_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", chat_template="its own")
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    config(tmp_path, f"[models.\"{model}\"]\ntemplate = '{tmp_path / 'mine.jinja'}'\n")
    monkeypatch.setenv("EDGELM_CONFIG_DIR", str(tmp_path))
    assert CliRunner().invoke(app, ["show", str(model), "--template"]).stdout.strip() == "{{ messages }}"
    (tmp_path / "mine.jinja").unlink()
    done = CliRunner().invoke(app, ["show", str(model), "--template"])
    assert "mine.jinja cannot be read" in str(done.exception)
    config(tmp_path, f"[models.\"{model}\"]\ntemplate = '~nobody-of-that-name/x.jinja'\n")
    done = CliRunner().invoke(app, ["show", str(model), "--template"])
    assert "cannot be read: no such user" in str(done.exception)
