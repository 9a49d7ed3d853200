"""Settings: the defaults, then `config.toml`, then `EDGELM_…`, then flags.

Owns the names, kinds and ranges of all settings and the places of our files. The only module of the package that
reads the environment. Knows nothing of what a setting does.
"""

from __future__ import annotations

import os
import tomllib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import platformdirs

from edgelm.errors import EdgeLMError, UsageError

Parse = Callable[[object], Any]  # a value of the file, the environment or a flag; raises ValueError that says what fits


def _number(kind: type[int | float], low: float, high: float, what: str) -> Parse:
    def parse(value: object) -> float:
        try:
            number = kind(str(value))  # a flag, a variable and a key of the file are read alike
        except ValueError:
            raise ValueError(what) from None
        if not low <= number <= high:
            raise ValueError(what)
        return number

    return parse


def _choice(*names: str) -> Parse:
    def parse(value: object) -> str:
        if value not in names:
            raise ValueError("one of " + ", ".join(names))
        return str(value)

    return parse


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or not value.strip():
        raise ValueError("printable ASCII text")
    return value.strip()


def _spec(value: object) -> str:
    text = str(value)
    if text not in ("auto", "off") and not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 64):
        raise ValueError("auto, off, or 1 to 64")
    return text


def _layers(value: object) -> str:
    text = str(value)
    if text != "auto" and not (text.isascii() and text.isdecimal() and int(text) <= 10_000):
        raise ValueError("auto, or a number of layers")
    return text


def _switch(value: object) -> bool:
    text = str(value).strip().casefold()
    if text not in _SWITCH:
        raise ValueError("1 or 0 (on or off, true or false)")
    return _SWITCH[text]


def _name(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or not value.strip():
        raise ValueError("a name or a path")
    return value


def _folders(value: object) -> tuple[str, ...]:
    found = value.split(os.pathsep) if isinstance(value, str) else value  # a variable is one text
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) and "\0" not in each for each in found):
        raise ValueError("a list of folders")
    return tuple(each for each in found if each.strip())


def _setting(default: object, parse: Parse, help_text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": help_text})


_count = _number(int, 1, 2**31 - 1, "a whole number of at least 1")
_SWITCH = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user can choose. A flag, an environment variable and a key of the file have the same name."""

    ctx: int | None = _setting(
        None, _count, "tokens of context (default: as many as the model has and memory allows, at most 8192)"
    )
    kv: str = _setting(
        "auto", _choice("auto", "f16", "k8v16", "int8", "k8v4", "fp8", "k6v4"), "how the KV cache is stored"
    )
    engine: str = _setting(
        "auto", _choice("auto", "torch", "llama"), "our own kernels (torch), llama.cpp (llama), or the better one here"
    )
    device: str = _setting(
        "auto", _choice("auto", "cuda", "gpu", "cpu"), "where to compute; gpu: as far as llama.cpp's build can"
    )
    gpu_layers: str = _setting("auto", _layers, "layers that llama.cpp computes on a GPU, where its build can")
    graphs: bool = _setting(True, _switch, "CUDA graphs: no gaps between the kernels of a step")
    quantize: str = _setting(
        "off", _choice("off", "int4"), "make 4-bit weights from those of 16 bits while they are loaded (torch engine)"
    )
    threads: int | None = _setting(None, _number(int, 1, 512, "1 to 512"), "CPU threads (default: physical cores)")
    parallel: int = _setting(8, _number(int, 1, 64, "1 to 64"), "sequences that run at the same time")
    spec: str = _setting("auto", _spec, "speculative decoding: auto, off, or the most tokens that a step may draft")
    draft: str | None = _setting(None, _name, "a smaller model of the same vocabulary that drafts besides")
    memory: bool = _setting(
        True, _switch, "remember answers, as tokens in a file of your own, to draft later ones from"
    )
    prefix_cache_ram: float | None = _setting(
        None, _number(float, 0, 1e6, "GiB"), "GiB of memory for idle conversations (default: a share of what is free)"
    )
    prefix_cache_disk: float = _setting(
        4.0, _number(float, 0, 1e6, "0 (off) or GiB"), "GiB on disk for idle conversations, of all models; 0: none"
    )
    prefix_cache_days: float = _setting(
        30.0, _number(float, 0, 1e5, "days"), "delete what of that was not used for so many days"
    )
    temperature: float = _setting(0.8, _number(float, 0, 100, "0 to 100"), "0 is greedy")
    top_k: int = _setting(40, _number(int, 0, 2**31 - 1, "0 (off) or more"), "sample among the K most likely tokens")
    top_p: float = _setting(0.95, _number(float, 1e-9, 1, "more than 0 and at most 1"), "and of those, this share")
    min_p: float = _setting(0.05, _number(float, 0, 0.999999, "0 to less than 1"), "of the best token's probability")
    seed: int | None = _setting(None, _number(int, 0, 2**63 - 1, "0 to 2**63 - 1"), "for answers that can be repeated")
    max_tokens: int | None = _setting(None, _count, "end the answer there (default: where the model does)")
    model_dirs: tuple[str, ...] = _setting(
        (), _folders, f"folders with models of your own, beside the hub's cache (as a variable: A{os.pathsep}B)"
    )
    host: str = _setting(
        "127.0.0.1", _text, "address that `edgelm serve` listens at; any but this machine's own needs a key"
    )
    port: int = _setting(11500, _number(int, 0, 65535, "0 to 65535"), "port of `edgelm serve`; 0: any free one")
    api_key: str | None = _setting(None, _text, "what clients of `edgelm serve` must send as their key")
    idle_timeout: float = _setting(
        600.0, _number(float, 0, 1e9, "0 (never) or seconds"), "unload a model that was not used for so many seconds"
    )


@dataclass(frozen=True)
class Places:
    """The folders of our files. `environment` may move them: EDGELM_{CONFIG,DATA,CACHE,RUNTIME}_DIR."""

    environment: Mapping[str, str]

    def _place(self, kind: str, default: str) -> Path:
        return Path(self.environment.get(f"EDGELM_{kind}_DIR") or default)

    @cached_property
    def config(self) -> Path:
        return self._place("CONFIG", platformdirs.user_config_dir("edgelm", appauthor=False))

    @cached_property
    def data(self) -> Path:
        return self._place("DATA", platformdirs.user_data_dir("edgelm", appauthor=False))

    @cached_property
    def cache(self) -> Path:
        return self._place("CACHE", platformdirs.user_cache_dir("edgelm", appauthor=False))

    @property
    def prefixes(self) -> Path:
        """Where idle conversations are kept for the next process: what was said is in these files."""
        return self.cache / "prefixes"

    @cached_property
    def runtime(self) -> Path:
        """Sockets, and where a running `edgelm serve` is found."""
        with warnings.catch_warnings(action="ignore"):  # no session folder: platformdirs takes a temporary one
            return self._place("RUNTIME", platformdirs.user_runtime_dir("edgelm", appauthor=False))

    @cached_property
    def hub(self) -> Path:
        """Return the folder where huggingface_hub keeps its downloads, by that package's own variables."""
        cache = Path(self.environment.get("XDG_CACHE_HOME") or "~/.cache")
        home = Path(self.environment.get("HF_HOME") or cache / "huggingface")
        given = self.environment.get("HF_HUB_CACHE") or self.environment.get("HUGGINGFACE_HUB_CACHE")
        return Path(given or home / "hub").expanduser()

    @property
    def hub_endpoint(self) -> str:
        return (self.environment.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def own_places() -> Places:
    """Return the places as this process's own environment has them, for the children of who loaded the settings."""
    return Places(os.environ)


@dataclass(frozen=True, slots=True)
class Config:
    """The settings in force, where each comes from, and the places."""

    settings: Settings
    sources: Mapping[str, str]  # setting: "default", a file, an environment variable or a flag
    places: Places


def load_config(flags: Mapping[str, object], environment: Mapping[str, str] | None = None) -> Config:
    """Return the settings; a flag that is None was not given.

    Raises EdgeLMError for a file that cannot be read, a name that is no setting, or a value that does not fit.
    """
    environment = os.environ if environment is None else environment
    places = Places(environment)
    values: dict[str, object] = {}
    sources = {each.name: "default" for each in fields(Settings)}
    for source, found in (
        (str(places.config / "config.toml"), _read_file(places.config / "config.toml")),
        ("EDGELM_{}", {name: environment[key] for name in sources if (key := f"EDGELM_{name.upper()}") in environment}),
        ("--{}", {name: value for name, value in flags.items() if value is not None}),
    ):
        for name, value in found.items():
            shown = name.upper() if source.startswith("EDGELM") else name.replace("_", "-")
            source_name = source.format(shown)
            values[name] = _parse(name, value, source_name)
            sources[name] = source_name
    return Config(replace(Settings(), **values), sources, places)  # type: ignore[arg-type]


def _parse(name: str, value: object, source: str) -> object:
    known = {each.name: each for each in fields(Settings)}
    if name not in known:
        raise EdgeLMError(f"{source}: there is no setting {name}", "the settings are " + ", ".join(known))
    try:
        return known[name].metadata["parse"](value)
    except ValueError as error:
        kind = UsageError if source.startswith("--") else EdgeLMError
        raise kind(f"{source}: {name} is {value!r}", f"give {error}") from None


def _read_file(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise EdgeLMError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EdgeLMError(f"{path} is not valid TOML: {error}", "correct or remove it") from None
