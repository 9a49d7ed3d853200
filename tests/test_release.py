"""The release workflow, which a tag runs: its scripts parse, name what exists, and publish what `make dist` makes."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
JOBS: dict[str, Any] = YAML(typ="safe").load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
STEPS = [(name, step) for name, job in JOBS.items() for step in job["steps"]]
PLATFORMS = ("linux_x86_64", "linux_aarch64", "macosx_13_0_arm64", "macosx_13_0_x86_64")


def filled(script: str, job: str) -> Iterator[str]:
    """Yield a script with the values of each row of its job's matrix."""
    matrix = JOBS[job].get("strategy", {}).get("matrix", {})
    lists = {name: values for name, values in matrix.items() if name != "include"}
    rows = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    for row in matrix.get("include", rows):
        text = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match, row=row: row[match[1]], script)
        assert "${{" not in text, text
        yield text


def scripts() -> Iterator[tuple[str, str]]:
    """Yield the shell and the text of each script, and of those that containers run."""
    for job, step in STEPS:
        for script in filled(step.get("run", ""), job):
            yield "bash", script
            yield from (
                (shell, inner) for shell, inner in re.findall(r" (sh|bash) -euc '(.*?)'\n", script + "\n", re.DOTALL)
            )


def step_named(part: str) -> str:
    (script,) = (step["run"] for _, step in STEPS if part in step.get("name", ""))
    return str(script)


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as GitHub does."""
    return subprocess.run(["bash", "-e", "-c", script], cwd=folder, capture_output=True, text=True, check=False)


def archives(version: str = "0.6.0") -> dict[str, list[str]]:
    """Return the files of a release by package: those that `make dist` makes on the platforms."""
    wheels = {name: [f"{name}-1-py3-none-{tag}.whl" for tag in PLATFORMS[:count]] for name, count in
              (("edgelm_llama", 4), ("edgelm_llama_vulkan", 2), ("edgelm_llama_cuda", 1))}  # fmt: skip
    wheels["edgelm_llama"].append("edgelm_llama-1.tar.gz")
    return wheels | {"edgelm": [f"edgelm-{version}-py3-none-any.whl", f"edgelm-{version}.tar.gz"]}


def released() -> dict[str, Any]:
    """Return the table [project] of what is released."""
    sys.path[:0] = [str(ROOT / "packaging" / "backend"), str(ROOT / "packaging" / "llama")]
    pytest.importorskip("setuptools")
    text: str = __import__("reproducible").released((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    del sys.path[:2]
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def test_every_script_is_one_that_its_shell_can_read() -> None:
    found = list(scripts())
    assert {shell for shell, _ in found} == {"bash", "sh"}
    for shell, script in found:
        done = subprocess.run([shell, "-n", "-c", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script


def test_every_file_target_and_option_of_the_scripts_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for _, script in scripts():
        for name, rest in re.findall(r"\bpackaging/(\w+\.(?:py|sh))([^\n]*)", script):
            text = (ROOT / "packaging" / name).read_text(encoding="utf-8")
            for option in re.findall(r" (--[a-z-]+)", rest):
                assert f'"{option}"' in text, (name, option)
        for target, variables in re.findall(r"^\s*(?:PATH=\S+ )?make (\w+)(.*)", script, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
            for variable in re.findall(r" ([A-Z]+)=", variables):
                assert re.search(rf"^{variable} \?=", makefile, re.MULTILINE), variable


def test_what_it_takes_from_outside_has_a_version() -> None:
    for _, step in STEPS:
        if "uses" in step:
            assert re.search(r"@[0-9a-f]{40}$", step["uses"]), f"{step['uses']} may become another one"
    for _, script in scripts():
        for line in re.findall(r"pip install (.*)", script):
            packages = [word for word in shlex.split(line) if not word.startswith(("-", "edgelm", "dist"))]
            assert all("<" in package for package in packages), line


def test_a_job_has_what_it_takes_from_the_others() -> None:
    uploads = {job: step["with"]["name"] for job, step in STEPS if "upload-artifact" in step.get("uses", "")}
    assert all(
        step["with"]["if-no-files-found"] == "error" for _, step in STEPS if "upload-art" in step.get("uses", "")
    )
    assert sorted(JOBS["collect"]["needs"]) == sorted(job for job, name in uploads.items() if name.startswith("dist-"))
    (taken,) = (step["with"]["name"] for job, step in STEPS if job == "publish" and "download-" in step.get("uses", ""))
    assert taken == uploads[JOBS["publish"]["needs"]]


def test_every_extra_that_a_release_brings_is_in_its_bill_of_materials() -> None:
    (extras,) = re.findall(r"edgelm\[(.*?)\]", step_named("Bill of materials"))
    # `dev` is of a checkout, and `cuda` is gigabytes of torch, which is nothing that we build.
    assert sorted(extras.split(",")) == sorted({*released()["optional-dependencies"]} - {"cuda", "dev"})


def test_the_macs_of_all_systems_that_llama_cpp_allows_are_meant() -> None:
    """Without it the wheel would need the runner's own system. cmake, `make dist` and delocate read the variable."""
    script = step_named("Build on macOS")
    assert script.index("export MACOSX_DEPLOYMENT_TARGET=13.3") < script.index("make dist") < script.index("delocate-")


def test_archives_of_two_platforms_with_other_bytes_are_no_release(tmp_path: Path) -> None:
    script = step_named("Compare")
    for platform in ("dist-a", "dist-b"):
        (tmp_path / "built" / platform).mkdir(parents=True)
        (tmp_path / "built" / platform / "edgelm-1.tar.gz").write_text("same")
        (tmp_path / "built" / platform / f"{platform}.whl").write_text(platform)
    assert run(script, tmp_path).returncode == 0
    assert sorted(path.name for path in (tmp_path / "dist").iterdir()) == [
        "dist-a.whl",
        "dist-b.whl",
        "edgelm-1.tar.gz",
    ]
    (tmp_path / "dist").rename(tmp_path / "before")
    (tmp_path / "built" / "dist-b" / "edgelm-1.tar.gz").write_text("other")
    assert run(script, tmp_path).returncode != 0


def test_each_archive_is_published_once_after_what_it_requires(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    for name in ("SHA256SUMS", "edgelm.cdx.json", *itertools.chain(*archives().values())):
        (tmp_path / "release" / name).touch()
    matrix = JOBS["publish"]["strategy"]["matrix"]["package"]
    assert JOBS["publish"]["strategy"]["max-parallel"] == 1, "in order"
    for package, script in zip(matrix, filled(step_named("Take the archives"), "publish"), strict=True):
        assert run(script, tmp_path).returncode == 0
        taken = tmp_path / "dist"
        assert sorted(path.name for path in taken.iterdir()) == sorted(archives()[package])
        taken.rename(tmp_path / package)
    project = released()
    requirements = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    ours = {re.split(r"[>=;]", each)[0].replace("-", "_") for each in requirements if each.startswith("edgelm-")}
    assert {*matrix} == ours | {"edgelm"}
    assert matrix[0] == "edgelm_llama", "the wheels for GPUs require it"
    assert matrix[-1] == "edgelm", "which requires the others"
