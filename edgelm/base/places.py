"""The folders of our files and of other programs' that we read, and the variables of the environment that name them.

Owns the variables that are no settings: folders, the hub's address, tokens. No other module reads these from the
environment; config.py owns the settings. Does not know what is in a folder.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from edgelm.base.errors import EdgeLMError

# Variables with a token of the hub: a child process starts without them, unless it needs them.
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True)
class Places:
    """The folders of our files. `environment` may move them: EDGELM_{CONFIG,DATA,CACHE,RUNTIME}_DIR.

    Each raises EdgeLMError where it is in a home folder that is not known.
    """

    environment: Mapping[str, str]

    def _place(self, kind: Literal["config", "data", "cache", "runtime"]) -> Path:
        if moved := self.environment.get(f"EDGELM_{kind.upper()}_DIR"):
            return Path(moved)
        from platformdirs import PlatformDirs  # here, since every worker imports this module

        try:
            return Path(getattr(PlatformDirs("edgelm", appauthor=False), f"user_{kind}_dir"))
        except RuntimeError:
            raise homeless() from None

    @cached_property
    def config(self) -> Path:
        return self._place("config")

    @cached_property
    def data(self) -> Path:
        return self._place("data")

    @cached_property
    def cache(self) -> Path:
        return self._place("cache")

    @property
    def prefixes(self) -> Path:
        """Idle conversations for the next process. These files hold their text, as tokens."""
        return self.cache / "prefixes"

    @cached_property
    def runtime(self) -> Path:
        """Sockets, and the record of a running `edgelm serve`."""
        with warnings.catch_warnings(action="ignore"):  # without a session folder platformdirs takes a temporary one
            return self._place("runtime")

    @cached_property
    def hub(self) -> Path:
        """Return the folder where huggingface_hub keeps its downloads, by that package's own variables."""
        cache = Path(self.environment.get("XDG_CACHE_HOME") or "~/.cache")
        home = Path(self.environment.get("HF_HOME") or cache / "huggingface")
        given = self.environment.get("HF_HUB_CACHE") or self.environment.get("HUGGINGFACE_HUB_CACHE")
        path = os.path.expandvars(expand_home(str(given or home / "hub")))  # as that package does
        if path.startswith("~/"):
            raise homeless()
        return Path(path)

    @property
    def systemd_units(self) -> Path:
        """Where the units of this user are, by systemd.unit(5)."""
        return Path(self.environment.get("XDG_CONFIG_HOME") or home_folder() / ".config") / "systemd" / "user"

    @property
    def ollama(self) -> list[Path]:
        """Where Ollama keeps its models, by its own variable; the folders that exist."""
        given = self.environment.get("OLLAMA_MODELS")
        service = Path("/usr/share/ollama/.ollama/models")  # of the service that its installer sets up
        places = [Path(given)] if given else [Path(expand_home("~/.ollama/models")), service]
        return [place for place in places if os.access(place / "manifests", os.R_OK | os.X_OK)]

    @property
    def wait_policy(self) -> Literal["", "sleep", "spin"]:
        """How threads wait for each other, by the user's own variables of OpenMP; empty: there are none."""
        given = [self.environment.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")]
        if not any(given):
            return ""
        return "sleep" if any(value and value.strip().lower() in ("0", "passive") for value in given) else "spin"

    @property
    def no_amx(self) -> bool:
        """Whether AMX is switched off in the builds of llama.cpp that packaging/llama_source.py has corrected."""
        return "EDGELM_NO_AMX" in self.environment

    @property
    def hub_endpoint(self) -> str:
        return (self.environment.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def home_folder() -> Path:
    """Return the user's home. Raises EdgeLMError where it is not known."""
    try:
        return Path.home()
    except RuntimeError:
        raise homeless() from None


def homeless() -> EdgeLMError:
    """Return the error for a user without a home, as in a container that runs with a number for a user."""
    return EdgeLMError("there is no home folder: HOME is not set, and the system does not know this user", "set HOME")


def expand_home(path: str) -> str:
    """Return a path with the home folder in place of ~; one of an unknown user stays, where pathlib would raise."""
    return os.path.expanduser(path)  # noqa: PTH111 - as the docstring says


def variables_of_a_shell(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that change what edgelm does, and that a service does not see."""
    kept = (*HUB_TOKENS, "EDGELM_HOST", "EDGELM_PORT", "EDGELM_API_KEY_FILE")  # its files have the last three
    begins = ("EDGELM_", "HF_", "HUGGINGFACE_HUB_", "CUDA_VISIBLE_DEVICES", "TRITON_", "OLLAMA_MODELS", "SSL_CERT_")
    folders = (f"XDG_{kind}_HOME" for kind in ("CONFIG", "DATA", "CACHE"))
    proxies = (f"{kind}_PROXY" for kind in ("HTTP", "HTTPS", "ALL", "NO"))
    others = {*folders, *(name for proxy in proxies for name in (proxy, proxy.lower()))}
    return sorted(name for name in environment if (name.startswith(begins) or name in others) and name not in kept)


def take_variables(*names: str) -> dict[str, str]:
    """Return variables of this process and remove them, so that no child gets them."""
    return {name: value for name in names if (value := os.environ.pop(name, None)) is not None}


def has_pip() -> bool:
    """Return whether this Python's environment has pip; one that uv made has none. Imports nothing of it."""
    from importlib.metadata import distributions  # here, since every worker imports this module

    return any(True for _ in distributions(name="pip"))


def own_places() -> Places:
    """Return the places of this process's own environment, for workers."""
    return Places(os.environ)


def own_environment() -> Mapping[str, str]:
    """Return the environment of this process, for a program of the user's choice that it starts."""
    return os.environ
