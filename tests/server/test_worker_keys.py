"""Keys of a running front: its own processes do not have them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.server.harness import processes_of, serving

SECRETS = {"EDGELM_API_KEY": "key-of-the-server", "HF_TOKEN": "hf_token_of_the_user", "OMP_WAIT_POLICY": "active"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_of_a_front_has_its_keys(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    with serving(own | SECRETS, models / "tiny.gguf", log=tmp_path / "log") as front:
        headers = {"authorization": f"Bearer {SECRETS['EDGELM_API_KEY']}"}
        assert front.chat(headers=headers).status_code == 200
        children = {pid: line for pid, line in processes_of(own).items() if pid != front.process.pid}
        assert any("engine_process" in line for line in children.values())
        assert any("template_worker" in line for line in children.values())
        for pid, line in children.items():
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"key-of-the-server" not in environ, line
            assert b"hf_token_of_the_user" not in environ, line
            assert b"OMP_WAIT_POLICY=active\0" in environ, line
            assert b"GOMP_SPINCOUNT" not in environ, line
