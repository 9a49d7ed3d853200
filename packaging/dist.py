"""Builds all that is released for this platform into a folder: edgelm's sdist and wheel, and edgelm-llama's.

Two builds of one commit have the same bytes; SOURCE_DATE_EPOCH sets their time. With --vulkan, also the wheel of
edgelm-llama-vulkan, which needs Vulkan's headers and glslc (vulkan_library.py); with --cuda, that of edgelm-llama-cuda,
which takes hours (cuda_library.py).

    python packaging/dist.py [--vulkan] [--cuda] dist
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPU_WHEELS = {"--vulkan": "vulkan_library.py", "--cuda": "cuda_library.py"}
sys.path.insert(0, str(ROOT / "packaging" / "llama"))
from backend import EPOCH, write_sdist  # noqa: E402 - the folder of a build backend is no package


def build_edgelm(out: Path, epoch: int) -> None:
    """Build edgelm's sdist, and its wheel from the sdist; both require edgelm-llama."""
    with tempfile.TemporaryDirectory() as scratch:
        # setuptools keeps its state in the tree, and takes what lies there: build from a copy of what git knows.
        tree = Path(scratch, "tree")
        listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        files = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        for name in filter(None, files.split("\0")):
            source, copy = ROOT / name, tree / name
            if source.is_symlink() or source.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy, follow_symlinks=False)
        environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
        command = [sys.executable, "-m", "build", "-Cllama=ready-made", "--outdir", scratch, str(tree)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        for built in (*Path(scratch).glob("*.whl"), *Path(scratch).glob("*.tar.gz")):
            shutil.move(built, out / built.name)


def main() -> int:
    """Build everything into the folder that is named."""
    scripts = ["llama_libraries.py", *(script for option, script in GPU_WHEELS.items() if option in sys.argv)]
    folders = [argument for argument in sys.argv[1:] if argument not in GPU_WHEELS]
    if len(folders) != 1:
        print("usage: dist.py [--vulkan] [--cuda] FOLDER", file=sys.stderr)
        return 2
    out = Path(folders[0]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("edgelm*.whl"), *out.glob("edgelm*.tar.gz")):
        old.unlink()
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or EPOCH)
    try:
        build_edgelm(out, epoch)
        write_sdist(out)
        for script in scripts:
            command = [sys.executable, str(ROOT / "packaging" / script), "--out", str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        return error.returncode or 1
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.name}")
    print(f"try it: pipx install --pip-args='--find-links {out}' edgelm, or: uv tool install --find-links {out} edgelm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
