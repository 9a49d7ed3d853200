"""Installs what `make dist` built as a user does, without a compiler, and tries it: times, sizes, variants, safety.

Owns the checks of the released files: pipx and uv install them in seconds, with cold and with warm caches; the first
answer comes soon; each CPU variant that this processor can run gives the same text; no library of another folder is
loaded. Needs pipx and uv, which it takes from the index, and a C compiler of its own for the planted library.

    .venv/bin/python packaging/dist_check.py [--compile] dist
    .venv/bin/python packaging/dist_check.py --checkout

--compile also installs as on a platform without our wheel, where pip compiles llama.cpp, which takes minutes.
--checkout installs the checkout itself instead: each tool, with a wheel of llama-cpp-python (this machine's cached one)
and without, where it must stop at once; and it resolves each extra.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from smoke import ROOT, SmokeError, clean_environment, llama_wheel_folder, new_environment, require, run

sys.path.insert(0, str(ROOT / "packaging" / "llama"))
from backend import PLACES

INSTALL_LIMIT_S, ANSWER_LIMIT_S = 30, 10
MAX_LIBRARY_BYTES = 15_000_000
# A compiler would hide that something is compiled.
FORBIDDEN = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "make", "ninja")
# The libraries of every glibc system. libgomp is none of them: slim images lack it.
SYSTEM_LIBRARIES = re.compile(r"(lib(c|m|gcc_s|stdc\+\+|dl|pthread|rt)|ld-linux-[\w-]+)\.so\.\d")
QUESTION = ("run", "starter", "What is edgelm?", "--json")
# The starter's answers to questions are chosen from quotations, which hides wrong numbers. Here it decodes each token.
GREEDY = ("--temperature", "0", "--max-tokens", "40", "--spec", "off", "--no-memory")
DECODE = ("run", "starter", "write a list of words", "--regex", r"(.|\n)*", *GREEDY, "--json")
MIN_DIFFERENT = 15  # tokens of that text: wrong numbers repeat one
COMPILE_LIMIT_S = 3600
# The planted library says that it was loaded by making a file.
PLANTED = '#include <stdio.h>\n__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }\n'
PLANTED += "int ggml_backend_score(void) { return 1000000; }\nvoid * ggml_backend_init(void) { return 0; }\n"


def path_without_compilers(folder: Path) -> str:
    """Return a PATH with all programs of ours but compilers: links in a folder."""
    folder.mkdir()
    for place in os.get_exec_path():
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            plain = program.name.rstrip("0123456789.-")
            link = folder / program.name
            if plain not in FORBIDDEN and not plain.endswith(("-gcc", "-g++")) and not link.exists():
                link.symlink_to(program.resolve())
    return str(folder)


def install(tool: Path, name: str, dist: Path, home: Path, environment: Mapping[str, str]) -> tuple[Path, float]:
    """Install edgelm with pipx or uv; return the command and the seconds."""
    for folder in ("bin", "tools", "pipx"):
        shutil.rmtree(home / folder, ignore_errors=True)
    if name == "pipx":
        command: list[str | Path] = [tool, "install", "--python", sys.executable]
        command += ["--pip-args", f"--find-links {dist}", "edgelm"]
    else:
        command = [tool, "tool", "install", "--python", sys.executable, "--find-links", dist, "edgelm"]
    start = time.monotonic()
    run(*command, cwd=home, environment=environment)
    return home / "bin" / "edgelm", time.monotonic() - start


def check_compiled(dist: Path, scratch: Path, environment: Mapping[str, str]) -> None:
    """Install without our wheel of libraries, so that pip compiles llama.cpp. Prints a row, and what pip's user saw."""
    sources = scratch / "sources"
    sources.mkdir()
    for path in (*dist.glob("edgelm-*.whl"), *dist.glob("edgelm_llama-*.tar.gz")):
        shutil.copy(path, sources)
    home = Path(environment["HOME"])
    for folder in (".cache", "bin", "pipx"):
        shutil.rmtree(home / folder, ignore_errors=True)
    load, start = os.getloadavg()[0], time.monotonic()
    command = [str(scratch / "tools" / "bin" / "pipx"), "install", "--python", sys.executable]
    command += ["--pip-args", f"--find-links {sources}", "edgelm"]
    shown = run_on_terminal(command, home, {**environment, "PATH": os.environ["PATH"]})
    seconds = time.monotonic() - start
    installed = home / "pipx" / "venvs" / "edgelm"
    size = sum(path.stat().st_size for path in installed.rglob("*") if path.is_file() and not path.is_symlink())
    answers = []
    for _ in range(2):
        start = time.monotonic()
        run(home / "bin" / "edgelm", *QUESTION, cwd=home, environment=environment)
        answers.append(time.monotonic() - start)
    times = f"{seconds:.1f} | {size / 1e6:.0f} | {answers[0]:.1f} | {answers[1]:.1f}"
    print(f"| pipx, no wheel for the platform | yes | cold | {times} |")
    notices = [line.strip() for line in shown.splitlines() if "edgelm: " in line]
    require(bool(notices), f"pip's user was not told that llama.cpp is compiled: {shown}")
    print(f"load average {load:.1f} before it, {os.getloadavg()[0]:.1f} after it; shown {len(notices)} times:")
    print(notices[0], flush=True)


def run_on_terminal(command: list[str], cwd: Path, environment: Mapping[str, str]) -> str:
    """Run a command with a terminal of its own, and return what it showed. Raises SmokeError."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.chdir(cwd)
            os.execve(command[0], command, environment)
        finally:
            os._exit(127)
    shown, end = b"", time.monotonic() + COMPILE_LIMIT_S
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            shown += (part := os.read(terminal, 65_536))
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not part:
            break
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = shown.decode(errors="replace")
    require(code == 0, f"exit {code} of: {' '.join(command)}\n{text[-4000:]}")
    return text


def check_install(dist: Path, scratch: Path, environment: Mapping[str, str]) -> Path:
    """Install with both tools, cold and warm; return the installed command. Prints a table."""
    tools = new_environment(scratch / "tools").parent
    run(tools / "pip", "install", "--quiet", "pipx>=1.7,<2", "uv", cwd=scratch, environment=environment)
    home = Path(environment["HOME"])
    print("| tool | compiler | cache | install s | size MB | first use and answer s | next answer s |", flush=True)
    print("|---|---|---|---|---|---|---|", flush=True)
    slow, command = [], home
    for name in ("pipx", "uv"):
        for cache in ("cold", "warm"):
            if cache == "cold":
                shutil.rmtree(home / ".cache", ignore_errors=True)
            command, seconds = install(tools / name, name, dist, home, environment)
            folder = Path(command).resolve().parent.parent
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
            shutil.rmtree(home / ".cache" / "edgelm", ignore_errors=True)
            answers = []
            for _ in range(2):
                start = time.monotonic()
                run(command, *QUESTION, cwd=home, environment=environment)
                answers.append(time.monotonic() - start)
            times = f"{seconds:.1f} | {size / 1e6:.0f} | {answers[0]:.1f} | {answers[1]:.1f}"
            print(f"| {name} | no | {cache} | {times} |", flush=True)
            if seconds > INSTALL_LIMIT_S or answers[0] > ANSWER_LIMIT_S:
                slow.append(f"{name}, {cache} cache")
    if slow:
        load = os.getloadavg()[0]
        print(f"slower than {INSTALL_LIMIT_S} and {ANSWER_LIMIT_S} s: {'; '.join(slow)}; load average {load:.1f}")
    return command


def check_checkout(scratch: Path, environment: Mapping[str, str]) -> None:
    """Install the checkout in every way, without a compiler. Prints a table."""
    wheels = llama_wheel_folder()
    tools = new_environment(scratch / "tools").parent
    run(tools / "pip", "install", "--quiet", "pipx>=1.7,<2", "uv", cwd=scratch, environment=environment)
    home, source = Path(environment["HOME"]), f"git+file://{ROOT}"
    # Where wheels may lie is named nowhere but in the command.
    nowhere = {name: value for name, value in environment.items() if not PLACES.search(name)}
    nowhere |= {"PIP_CONFIG_FILE": os.devnull}
    python = home / "bare" / "bin" / "python"
    ways: dict[str, tuple[list[str | Path], list[str | Path]]] = {
        "pipx": ([tools / "pipx", "install", source], ["--pip-args", f"--find-links {wheels}"]),
        "uv": ([tools / "uv", "tool", "install", "--python", sys.executable, ROOT], ["--find-links", wheels]),
        "pip": ([python, "-m", "pip", "install", source], ["--find-links", wheels]),
    }
    print("| tool | wheel | seconds | result |\n|---|---|---|---|", flush=True)
    for name, (command, links) in ways.items():
        for has_wheel in (False, True):
            for folder in ("bin", "tools", "pipx", "bare"):
                shutil.rmtree(home / folder, ignore_errors=True)
            new_environment(python.parents[1])
            start = time.monotonic()
            try:
                run(*command, *(links if has_wheel else ()), cwd=home, environment=nowhere)
                result = "installed"
            except SmokeError as error:
                require(not has_wheel, str(error))
                require("there is no C++ compiler" in str(error), f"{name} does not say why it fails: {error}")
                result = "stops: no compiler"
            require(has_wheel == (result == "installed"), f"{name}, wheel {has_wheel}: {result}")
            print(
                f"| {name} | {'yes' if has_wheel else 'no'} | {time.monotonic() - start:.1f} | {result} |", flush=True
            )
            if has_wheel:
                edgelm = python.with_name("edgelm") if name == "pip" else home / "bin" / "edgelm"
                run(edgelm, *QUESTION, cwd=home, environment=environment)
    for extra in ("", "cuda", "llama-cuda", "mcp", "vulkan"):
        command = [tools / "uv", "pip", "compile", "--quiet", "--find-links", wheels, "--python", sys.executable]
        command += [
            *(["--extra", extra] if extra else []),
            "--output-file",
            scratch / "resolved",
            ROOT / "pyproject.toml",
        ]
        run(*command, cwd=home, environment=nowhere)
        lines = (scratch / "resolved").read_text().splitlines()
        print(f"extra {extra or 'none'}: {sum('==' in line for line in lines)} packages, all on the index", flush=True)


def check_variants(command: Path, scratch: Path, environment: Mapping[str, str]) -> None:
    """Take away the best variant until none is left; the text must stay the same."""
    python = command.resolve().parent / "python"
    code = "from edgelm.backends.llama.binding import BUILD, cpu_library; print(BUILD.lib_dir); print(cpu_library.name)"
    first: list[int] = []
    count = 0
    while True:
        try:
            folder, variant = run(python, "-c", code, cwd=scratch, environment=environment).splitlines()
        except SmokeError as error:
            require("no kernels for this processor" in str(error), str(error))
            break
        answer = json.loads(run(command, *DECODE, cwd=scratch, environment=environment))
        first = first or answer["token_ids"]
        require(len(set(first)) >= MIN_DIFFERENT, f"{variant} decodes {answer['text']!r}")
        require(answer["token_ids"] == first, f"{variant} answers {answer['text']!r}")
        if not count:
            report = json.loads(doctor(command, scratch, environment))
            texts = [finding["text"] for finding in report["findings"]]
            require(any(variant in text for text in texts), f"doctor does not name {variant}: {texts}")
            print(f"text of every variant: {answer['text']!r}")
        speed = answer["timings"]["decode_tokens_per_second"]
        print(f"variant {variant}: {len(first)} equal tokens, {speed:.0f} tok/s", flush=True)
        (Path(folder) / variant).rename(Path(folder) / f"{variant}.away")
        count += 1
    require(count > 0, "no variant runs here")
    for away in Path(folder).glob("*.away"):
        away.rename(away.with_suffix(""))


def doctor(command: Path, scratch: Path, environment: Mapping[str, str]) -> str:
    """Return the report of `edgelm doctor --json`, which ends with 1 where it finds a problem, such as no hub."""
    done = subprocess.run(
        [command, "doctor", "--json"], cwd=scratch, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout


def check_planted(command: Path, scratch: Path, environment: Mapping[str, str]) -> None:
    """Run beside a planted library, which must not be loaded."""
    folder, mark = scratch / "planted", scratch / "it-was-loaded"
    folder.mkdir()
    source = folder / "planted.c"
    source.write_text(PLANTED % mark)
    library = folder / "libggml-cpu-x.so"
    run("cc", "-shared", "-fPIC", "-o", library, source, cwd=folder, environment=os.environ)
    shutil.copy(library, folder / "libggml-vulkan-x.so")
    variables = {**environment, "GGML_BACKEND_PATH": str(library)}
    run(command, *QUESTION, cwd=folder, environment=variables)
    doctor(command, folder, variables)
    require(not mark.exists(), "a library of the current folder, or of GGML_BACKEND_PATH, was loaded")
    code = f"import ctypes; ctypes.CDLL({str(library)!r})"
    run(sys.executable, "-c", code, cwd=scratch, environment=os.environ)
    require(mark.exists(), "the planted library would not have been noticed")
    print("no library of the current folder or of GGML_BACKEND_PATH is loaded")


def check_libraries(command: Path, scratch: Path, dist: Path) -> None:
    """Check what the libraries need, and their size."""
    (wheel,) = [path for path in dist.glob("edgelm_llama-*.whl") if not path.name.endswith("-any.whl")]
    require(wheel.stat().st_size < MAX_LIBRARY_BYTES, f"{wheel.name} has {wheel.stat().st_size / 1e6:.1f} MB")
    folder = next(command.resolve().parent.parent.glob("lib/python*/site-packages/edgelm_llama/lib"))
    own = {path.name for path in folder.iterdir()}
    needed = set()
    for path in folder.iterdir():
        text = run("readelf", "-dlW", path, cwd=scratch, environment={**os.environ, "LC_ALL": "C"})
        needed |= {line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line}
        stack = next(line for line in text.splitlines() if "GNU_STACK" in line)
        require("E" not in stack.split()[-2], f"{path.name} wants an executable stack")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, needs {', '.join(sorted(needed - own))}")
    foreign = [name for name in sorted(needed - own) if not SYSTEM_LIBRARIES.fullmatch(name)]
    require(not foreign, f"not every system has {', '.join(foreign)}")


def main() -> int:
    """Do all checks of the folder that is named."""
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    dist = Path(folders[0] if folders else "dist").resolve()
    with tempfile.TemporaryDirectory(prefix="edgelm-dist-") as folder:
        scratch = Path(folder).resolve()
        home = scratch / "home"
        home.mkdir()
        environment = clean_environment(home)
        environment |= {"PIPX_BIN_DIR": str(home / "bin"), "UV_TOOL_BIN_DIR": str(home / "bin")}
        environment |= {"UV_TOOL_DIR": str(home / "tools"), "UV_CACHE_DIR": str(home / ".cache" / "uv")}
        environment["PATH"] = path_without_compilers(scratch / "path")
        try:
            if "--checkout" in sys.argv:
                check_checkout(scratch, environment)
                return 0
            command = check_install(dist, scratch, environment)
            if sys.platform.startswith("linux"):
                check_libraries(command, scratch, dist)
            check_variants(command, scratch, environment)
            check_planted(command, scratch, environment)
            if "--compile" in sys.argv:
                check_compiled(dist, scratch, environment)
        except SmokeError as error:
            print(f"dist check: failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
