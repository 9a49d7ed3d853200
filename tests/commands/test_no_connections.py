"""Nothing calls home: the connections of traced commands, and their answers where there is no network at all."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 180
ELSEWHERE = re.compile(r"connect\(.*sa_family=(?!AF_UNIX)(\w+)(?!.*(?:127\.0\.0\.1|\"::1\"))")
SERVED = """
import subprocess, sys, urllib.request, json
front = subprocess.Popen([sys.executable, "-m", "edgelm", "serve", "--port", "0", "--json"], stdout=subprocess.PIPE)
address = json.loads(front.stdout.readline())["address"]
body = {"model": "starter", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
headers = {"content-type": "application/json"}
request = urllib.request.Request(address + "/v1/chat/completions", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
front.terminate()
sys.exit(front.wait() not in (0, -15, 143))
"""
COMMANDS = {
    "run": ["-m", "edgelm", "run", "starter", "hello", "--max-tokens", "4"],
    "plan": ["-m", "edgelm", "plan", "starter"],
    "serve": ["-c", SERVED],
}


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("name", ["run", "serve"])
def test_nothing_beyond_this_machine_is_connected_to(
    name: str, server_environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "strace"
    command = ["strace", "-f", "-qq", "-e", "trace=connect", "-s", "200", "-o", log, sys.executable, *COMMANDS[name]]
    done = subprocess.run(command, env=server_environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    calls = log.read_text().splitlines()
    assert calls, "strace saw nothing"
    assert [line for line in calls if ELSEWHERE.search(line)] == []


def test_the_pattern_finds_what_it_is_for() -> None:
    address = '123 connect(3, {sa_family=AF_INET, sin_port=htons(443), sin_addr=inet_addr("%s")}, 16) = 0'
    assert ELSEWHERE.search(address % "93.184.216.34")
    assert not ELSEWHERE.search(address % "127.0.0.1")
    six = '123 connect(3, {sa_family=AF_INET6, sin6_port=htons(1), inet_pton(AF_INET6, "%s", &sin6_addr)}, 28) = 0'
    assert ELSEWHERE.search(six % "2606::1")
    assert not ELSEWHERE.search(six % "::1")
    assert not ELSEWHERE.search('123 connect(3, {sa_family=AF_UNIX, sun_path="/run/x"}, 20) = 0')


@pytest.mark.parametrize("name", ["run", "plan"])
def test_commands_work_without_a_network(name: str, server_environment: dict[str, str]) -> None:
    alone = ["unshare", "-rn"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    done = subprocess.run(
        [*alone, sys.executable, *COMMANDS[name]],
        env=server_environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
