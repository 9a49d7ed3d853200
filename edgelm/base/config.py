"""Settings: the defaults, then `config.toml`, then `EDGELM_…`, then flags.

Owns every setting (its name, default, check, help, and the commands that have a flag for it): no other module reads
them from the environment. Does not know the effect of a setting.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edgelm.base.errors import EdgeLMError, UsageError
from edgelm.base.kv_modes import KV_MODES
from edgelm.base.model_tables import ModelTable, meant, owner_of, parse_tables, table_of
from edgelm.base.places import Places
from edgelm.base.sampling import SamplingSettings
from edgelm.base.setting_checks import (
    Check,
    Setting,
    choice,
    number,
    parse_adapters,
    parse_device,
    parse_folders,
    parse_name,
    parse_overrides,
    parse_switch,
    parse_text,
    word_or_number,
    words,
)
from edgelm.base.setting_checks import setting_field as _setting

_COUNT = number(int, 1, 2**31 - 1, "a whole number of at least 1")
_SWITCH_CHECK = Check(parse_switch, "", "switch")
_TEXT = Check(parse_text, "TEXT")
_PATH = Check(parse_name, "FILE")
_parse_origins = words(
    r"local|(?!file:)[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+", "local, or origins such as https://chat.example.org"
)
_parse_hosts = words(r"[a-z0-9._-]+|[0-9a-f.:]+", "host names or addresses, without a port")
_parse_picture_hosts = words(
    r"([a-z0-9._-]+|\[[0-9a-f.:]+\])(:[1-9]\d*)?", "host names or addresses, with a port that is not the usual one"
)
_LOADING = "chat run bench serve"  # the commands that load a model to use it
_DRAFTING = "chat run serve"
DEFAULT_CONTEXT = 8192  # tokens, the most without `ctx`
DRAFT_CHOICES = ("auto", "ngram", "mtp", "off")  # values of `draft` that name no model
_ALL = f"{_LOADING} eval plan"


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How a model is loaded, and how its engine works."""

    ctx: int | None = _setting(
        None,
        _COUNT,
        "tokens of context (default: as many as the model has and memory allows, at most 8192)",
        f"{_LOADING} plan embed",
    )
    kv: str = _setting(
        "auto",
        choice("auto", *KV_MODES, metavar="MODE"),
        "how the KV cache is stored: auto; " + "; ".join(f"{mode.name}: {mode.help}" for mode in KV_MODES.values()),
        _ALL,
    )
    engine: str = _setting(
        "auto",
        choice("auto", "torch", "llama"),
        "our own kernels (torch), llama.cpp (llama), or the better one here",
        f"{_ALL} embed",
    )
    device: str = _setting(
        "auto",
        Check(parse_device, "auto|cuda|gpu|cpu|NAME"),
        "where to compute: cuda, by our own kernels; gpu, by llama.cpp; or names of its devices, such as Vulkan0",
        f"{_ALL} embed",
    )
    gpu_layers: str = _setting(
        "auto",
        word_or_number(("auto", "all"), 0, 10_000, "auto, all, or a number of layers"),
        "the last N layers, counting the output as one, are llama.cpp's on the GPU; auto: as many as fit",
        f"{_LOADING} plan embed",
    )
    n_cpu_moe: str = _setting(
        "auto",
        word_or_number(("auto", "all"), 0, 10_000, "auto, all, or a number of layers"),
        "keep the experts of the first N layers in main memory when llama.cpp uses a GPU; auto: as many as must",
        f"{_LOADING} plan",
    )
    override_tensor: tuple[str, ...] = _setting(
        (),
        Check(parse_overrides, "PATTERN=DEVICE", "list"),
        "place tensors whose names match a regular expression on a device of llama.cpp, or on CPU",
        f"{_LOADING} plan",
    )
    lora: tuple[str, ...] = _setting(
        (),
        Check(parse_adapters, "ADAPTER[:SCALE]", "list"),
        "a LoRA adapter made for the model: a folder of PEFT's or a GGUF; :0.5 halves its effect (llama.cpp)",
        f"{_ALL} embed",
    )
    mmproj: str = _setting(
        "auto",
        Check(parse_name, "auto|off|FILE"),
        "the model's projector, which reads pictures: auto, the one that belongs to it; off; or a GGUF (llama.cpp)",
        f"{_LOADING} plan show",
    )
    graphs: bool = _setting(True, _SWITCH_CHECK, "CUDA graphs: no gaps between the kernels of a step (torch)", _LOADING)
    tune: bool = _setting(
        False,
        _SWITCH_CHECK,
        "measure variants of each kernel when a model first runs on a GPU, keep the fastest and use them (torch)",
        f"{_LOADING} embed",
    )
    quantize: str = _setting(
        "off", choice("off", "int4"), "make 4-bit weights from those of 16 bits while they are loaded (torch)", _ALL
    )
    threads: int | None = _setting(
        None, number(int, 1, 512, "1 to 512"), "CPU threads (default: physical cores)", f"{_ALL} convert embed"
    )
    parallel: int = _setting(
        8, number(int, 1, 64, "1 to 64"), "sequences of a model that run at the same time", "serve"
    )
    draft: str = _setting(
        "auto",
        Check(parse_name, "|".join([*DRAFT_CHOICES, "MODEL"])),
        "who drafts tokens: ngram, from texts; mtp, the model's own heads; auto, both; off; or MODEL, a smaller one "
        "of the same vocabulary, beside both",
        f"{_DRAFTING} plan",
    )
    spec: str = _setting(
        "auto",
        word_or_number(("auto", "off"), 1, 64, "auto, off, or 1 to 64"),
        "the most tokens that a step may draft; off: as --draft off",
        _DRAFTING,
    )
    repeatable: bool = _setting(
        False,
        _SWITCH_CHECK,
        "equal requests with equal seeds get equal answers, to the letter; slower in long contexts",
        f"{_LOADING} plan",
    )
    memory: bool = _setting(
        True, _SWITCH_CHECK, "remember answers, as tokens in a file of your own, to draft later ones from", "run serve"
    )
    prefix_cache_ram: float | None = _setting(
        None,
        number(float, 0, 1e6, "GiB"),
        "GiB of memory for idle conversations (default: a share of what is free)",
        "serve",
    )
    prefix_cache_disk: float = _setting(
        4.0,
        number(float, 0, 1e6, "0 (off) or GiB"),
        "GiB on disk for idle conversations, of all models; 0: none",
        "serve",
    )
    prefix_cache_days: float = _setting(
        30.0,
        number(float, 0, 1e5, "days"),
        "delete idle conversations on disk that were not used for this many days",
        "serve",
    )
    prefix_cache_shared: float = _setting(
        25.0,
        number(float, 0, 100, "0 to 100"),
        "percent of the prefix cache, in memory and on disk, in which the shared prompts of each key are deleted last",
        "serve",
    )


@dataclass(frozen=True, kw_only=True)
class Settings(SamplingSettings, EngineSettings):
    """The values that a user can choose. A flag, an environment variable and a key of the file have the same name."""

    model_dirs: tuple[str, ...] = _setting(
        (),
        Check(parse_folders, "FOLDER", "list"),
        f"folders with models of your own, beside the hub's cache (as a variable: A{os.pathsep}B)",
        "run serve list show",
    )
    template: str | None = _setting(
        None, _PATH, "a file with a chat template (Jinja) in place of the model's own", "run serve"
    )
    max_models: int | None = _setting(
        None, _COUNT, "models that are loaded at the same time (default: as many as memory allows)", "serve"
    )
    max_memory: float | None = _setting(
        None,
        number(float, 0.01, 1e6, "GiB"),
        "GiB of memory for all loaded models together (default: what is free)",
        "serve",
    )
    host: str = _setting(
        "127.0.0.1",
        _TEXT,
        "address that `edgelm serve` listens at; any but this machine's own needs a key",
        "serve service",
    )
    port: int = _setting(
        11500, number(int, 0, 65535, "0 to 65535"), "port of `edgelm serve`; 0: any free one", "serve service"
    )
    ollama_port: int | None = _setting(
        None,
        number(int, 1, 65535, "1 to 65535"),
        "a second port of `edgelm serve`, for clients that know only Ollama's: 11434",
        "serve",
    )
    api_key: str | None = _setting(
        None,
        _TEXT,
        "the key that clients of `edgelm serve` must send; as a flag, other users of this machine can see it",
        "serve",
        secret=True,
    )
    api_key_file: str | None = _setting(
        None, _PATH, "a file of your own with keys, in lines of `NAME KEY`, `NAME KEY admin` or `KEY`", "serve service"
    )
    origin: tuple[str, ...] = _setting(
        (),
        Check(_parse_origins, "ORIGIN", "list"),
        "web pages that may send requests, such as https://a.example; local: pages of this machine's servers, "
        "web views of editors and browser extensions",
        "serve",
    )
    allowed_host: tuple[str, ...] = _setting(
        (),
        Check(_parse_hosts, "NAME", "list"),
        "another name of the server in the requests of a proxy or a container",
        "serve",
    )
    picture_host: tuple[str, ...] = _setting(
        (),
        Check(_parse_picture_hosts, "NAME", "list"),
        "a host from which pictures are fetched where a request gives their address; a private one by its address",
        "serve",
    )
    tls_cert: str | None = _setting(
        None, _PATH, "serve https with this certificate, a PEM file with its chain", "serve"
    )
    tls_key: str | None = _setting(
        None, _PATH, "the private key of --tls-cert, a PEM file; none: the certificate's file has it", "serve"
    )
    idle_timeout: float = _setting(
        600.0,
        number(float, 0, 1e9, "0 (never) or seconds"),
        "unload a model that was not used for this many seconds",
        "serve",
    )
    log_format: str = _setting(
        "text",
        choice("text", "json"),
        "json: a log in lines of JSON, with one for each request, without its texts",
        "serve",
    )
    ctx_is_default: bool = False  # no setting: `ctx` is for every model, and at most what fits this one

    @property
    def without_keys(self) -> Settings:
        """The same settings without secrets, for a process that needs none."""
        secrets: dict[str, Any] = {name: None for name, setting in SETTINGS.items() if setting.secret}
        return replace(self, **secrets)

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted."""
        return self.draft != "off" and self.spec != "off"

    @property
    def draft_model(self) -> str | None:
        """The smaller model that drafts, by name or path; None: there is none."""
        return self.draft if self.drafts and self.draft not in DRAFT_CHOICES else None

    @property
    def max_draft(self) -> int | None:
        """The most tokens that a step may draft; None: as many as pay."""
        return int(self.spec) if self.spec not in ("auto", "off") else None

    def may_draft(self, drafter: str) -> bool:
        """Tell whether a drafter may draft: ngram or mtp."""
        return self.drafts and (self.draft == drafter or self.draft not in ("ngram", "mtp"))

    @property
    def model_folders(self) -> list[Path]:
        return [Path(folder) for folder in self.model_dirs]

    @property
    def max_memory_bytes(self) -> int | None:
        return None if self.max_memory is None else int(self.max_memory * 2**30)


SETTINGS: Mapping[str, Setting] = {
    entry.name: entry.metadata["setting"] for entry in fields(Settings) if entry.metadata
}
# The settings that a model can have of its own, in a table [models."NAME"] of config.toml.
MODEL_SETTINGS: Mapping[str, Setting] = {
    name: setting
    for name, setting in SETTINGS.items()
    if ("run" in setting.commands and name != "model_dirs") or name in ("parallel", "prefix_cache_ram")
}
# Tables of config.toml that only the chat reads; their owners parse them when the chat starts.
CHAT_TABLES = ("presets", "folders", "keys", "themes", "tools")
# Environment variables with a key: a child process starts without them, unless it needs them.
API_KEYS = tuple(f"EDGELM_{name.upper()}" for name, setting in SETTINGS.items() if setting.secret)


@dataclass(frozen=True, slots=True)
class Config:
    """The settings in force, where each comes from, and the places."""

    settings: Settings
    sources: Mapping[str, str]  # setting: "default", a file, an environment variable or a flag
    places: Places
    models: tuple[ModelTable, ...] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)  # CHAT_TABLES that the file has, as they stand there

    def for_model(self, *names: str | None) -> Config:
        """Return the settings of the model with these names: its own beat those of all models in the file."""
        table = table_of(self.models, filter(None, names))
        settings, source = (table.settings, table.source) if table else ({}, "")
        own = {name: value for name, value in settings.items() if not self._is_explicit(name)}
        is_default = "ctx" not in own and not self.sources["ctx"].startswith("--")
        sources = {**self.sources, **dict.fromkeys(own, source)}
        return replace(self, settings=replace(self.settings, **own, ctx_is_default=is_default), sources=sources)

    def keep_alive_of(self, *names: str | None) -> float | None:
        """Return how many seconds the model with these names stays loaded; None: as `idle_timeout` says."""
        table = table_of(self.models, filter(None, names))
        return table.keep_alive_s if table else None

    def model_name(self, name: str) -> str:
        """Return the name of a model, also for one of its aliases."""
        return owner_of(self.models, name) or name

    def remote_model(self, name: str) -> ModelTable | None:
        """Return the table of a model by its name or an alias, if another server runs it."""
        table = table_of(self.models, [self.model_name(name), name])
        return table if table is not None and table.remote is not None else None

    @property
    def model_folders(self) -> list[Path]:
        """The user's own folders, and Ollama's store."""
        return [*self.settings.model_folders, *self.places.ollama]

    @property
    def library(self) -> str:
        """A hash of the folders of models, settings and data: servers with another one serve other models.

        A flag adds models to one server, as files that it is given do.
        """
        own = [] if self.sources["model_dirs"].startswith("--") else self.settings.model_folders
        folders = (self.places.hub, *own, *self.places.ollama, self.places.config, self.places.data)
        return hashlib.sha256("\0".join(map(os.path.realpath, folders)).encode(errors="surrogateescape")).hexdigest()[
            :32
        ]

    def _is_explicit(self, name: str) -> bool:
        return self.sources[name].startswith(("--", "EDGELM_"))


def load_config(flags: Mapping[str, object], environment: Mapping[str, str] | None = None) -> Config:
    """Return the settings; a flag that is None was not given.

    Raises EdgeLMError for a file that cannot be read, and UsageError for an unknown setting and a value that does not
    fit.
    """
    environment = os.environ if environment is None else environment
    places = Places(environment)
    values: dict[str, object] = {}
    sources = dict.fromkeys(SETTINGS, "default")
    variables = {name: environment[key] for name in SETTINGS if (key := f"EDGELM_{name.upper()}") in environment}
    file = places.config / "config.toml"
    document = _read_file(file)
    parsers = {name: setting.parse for name, setting in MODEL_SETTINGS.items()}
    tables = {name: document.pop(name) for name in CHAT_TABLES if name in document}
    models = parse_tables(document.pop("models", {}), str(file), parsers, SETTINGS.keys() - MODEL_SETTINGS.keys())
    for source, level in (
        (str(file), document),
        ("EDGELM_{}", variables),
        ("--{}", {name: value for name, value in flags.items() if value is not None}),
    ):
        for name, value in level.items():
            spelled = name.upper() if source.startswith("EDGELM") else name.replace("_", "-")
            sources[name] = source.format(spelled)
            values[name] = _parse(name, value, sources[name])
    return Config(replace(Settings(), **values), sources, places, models, tables)  # type: ignore[arg-type]


def _parse(name: str, value: object, source: str) -> object:
    if name not in SETTINGS:
        raise UsageError(f"{source}: there is no setting {name}", meant(name, list(SETTINGS)))
    try:
        return SETTINGS[name].parse(value)
    except ValueError as error:
        values = value if SETTINGS[name].kind == "list" and isinstance(value, list) else [value]
        raise UsageError(f"{source}: {name} is {', '.join(map(repr, values))}", f"give {error}") from None


def _read_file(path: Path) -> dict[str, object]:
    import tomllib  # here, since every worker imports this module

    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise EdgeLMError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # tomllib's own, no UTF-8, a number of thousands of digits
        raise UsageError(f"{path} is not valid TOML: {error}", "correct or remove it") from None
