"""How fast one file comes: our pull, the hub client's hf_hub_download, and curl, from the same server on this machine.

    python -m tests.bench.bench_pull [--rounds 9] [--size 1000000000] [--folder FOLDER]

The server is a process of its own that sends from the page cache with sendfile; each program is a new process, one
after the other, in another order each round. A time is that of the download alone: for ours from the name to the file
in the cache, listing and hash included; for the client that of the call; for curl that of the program. The client
checks no hash, and curl neither: `curl+sha256` runs sha256sum after it, which is what it takes to know as much.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from tests.library.hub_server import HubServer

NAME, FILE = "o/m-GGUF", "m-Q4_K_M.gguf"
HERE = [sys.executable, "-m", "tests.bench.bench_pull"]
PROGRAMS = ("ours", "client", "curl", "curl+sha256")


def serve(path: Path) -> None:
    """Serve one file until standard input closes."""
    with HubServer() as server:
        server.add(NAME, {FILE: path})
        print(server.url, flush=True)
        sys.stdin.read()


def fetch_with(program: str, url: str, folder: Path) -> None:
    """Fetch the file in this process; print the seconds."""
    if program == "ours":
        import huggingface_hub.hf_api  # noqa: F401 - our part of the time is the download, not Python's start

        from edgelm.library.hub import Hub
        from edgelm.library.names import HubReference
        from edgelm.library.pull import pull

        begun = time.perf_counter()
        pull(HubReference(NAME), Hub(url, folder), lambda _: None)
    else:
        from huggingface_hub import hf_hub_download

        begun = time.perf_counter()
        hf_hub_download(NAME, FILE, cache_dir=folder, endpoint=url)
    print(time.perf_counter() - begun)


def measure(program: str, url: str, folder: Path) -> float:
    """Return the seconds of one download into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if program in ("ours", "client"):
        environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
        command = [*HERE, "--fetch", program, "--url", url, "--folder", str(folder)]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        seconds = float(done.stdout)
    else:
        begun = time.perf_counter()
        out = folder / "out"
        subprocess.run(["curl", "-sfL", "-o", str(out), f"{url}/{NAME}/resolve/main/{FILE}"], check=True)
        if program == "curl+sha256":
            subprocess.run(["sha256sum", str(out)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begun
    shutil.rmtree(folder)
    return seconds


def bench(size: int, rounds: int, folder: Path) -> None:
    """Measure all programs in turn, and print medians and the ratio of each round."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name, "source")
        with path.open("wb") as file:
            for _ in range(0, size, 10**7):
                file.write(random.randbytes(min(10**7, size - file.tell())))
        server = subprocess.Popen(
            [*HERE, "--serve", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert server.stdin is not None
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        times: dict[str, list[float]] = {program: [] for program in PROGRAMS}
        for turn in range(rounds + 1):  # the first warms up
            order = list(PROGRAMS) if turn % 2 else list(reversed(PROGRAMS))
            for program in order:
                seconds = measure(program, url, Path(name, "target"))
                if turn:
                    times[program].append(seconds)
        server.stdin.close()
        server.wait()
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{size / 1e6:,.0f} MB into {folder} ({file_system(folder)}), {rounds} rounds, load at the end {load}")
    for program, each in times.items():
        ratios = [curl / own for curl, own in zip(times["curl"], each, strict=True)]
        print(
            f"  {program:12} median {size / 1e6 / statistics.median(each):7.0f} MB/s"
            f"   best {size / 1e6 / min(each):7.0f} MB/s"
            f"   of curl: median of rounds {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        )


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder."""
    done = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, default=10**9)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fetch", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    elif options.fetch:
        fetch_with(options.fetch, options.url, options.folder)
    else:
        libraries = ", ".join(f"{name} {version(name)}" for name in ("huggingface_hub", "httpx2"))
        print(f"Python {platform.python_version()}, {libraries}, {os.cpu_count()} cores")
        bench(options.size, options.rounds, options.folder)


if __name__ == "__main__":
    main()
