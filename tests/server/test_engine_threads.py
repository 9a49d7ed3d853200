"""An engine process computes on one thread: with two teams of OpenMP in a process, the threads of both sleep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgelm.base.machine.llama_build import find_build
from tests.server.harness import serving

# Stands before libgomp's function, and counts the threads alive that have begun a team.
COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
static _Thread_local int counted;
static atomic_int alive, most;
static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void ended(void *value) { (void) value; atomic_fetch_sub(&alive, 1); }
static void make_key(void) { pthread_key_create(&key, ended); }

void GOMP_parallel(void (*job)(void *), void *data, unsigned threads, unsigned flags) {
    if (threads > 1 && !counted) {
        pthread_once(&once, make_key);
        pthread_setspecific(key, &key);
        counted = 1;
        int now = atomic_fetch_add(&alive, 1) + 1;
        FILE *file = fopen(getenv("TEAMS_FILE"), "a");
        fprintf(file, "%d\n", now);
        fclose(file);
    }
    ((parallel_fn) dlsym(RTLD_NEXT, "GOMP_parallel"))(job, data, threads, flags);
}
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counter")
    (folder / "counter.c").write_text(COUNTER)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", "counter.so", "counter.c", "-Wl,--no-as-needed", "-fopenmp"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return folder / "counter.so"


@pytest.mark.skipif(
    sys.platform == "darwin" or find_build().ready_made,
    reason="libgomp is what a llama-cpp-python compiled on Linux has",
)
def test_one_thread_computes(counter: Path, own: dict[str, str], models: Path, tmp_path: Path) -> None:
    """Costs of rows are measured while the model is loaded, a draft model drafts, and the engine embeds."""
    teams = tmp_path / "teams"
    environment = own | {
        "EDGELM_SPEC": "4",
        "EDGELM_DRAFT": str(models / "long.gguf"),
        "EDGELM_THREADS": "2",
        "LD_PRELOAD": str(counter),
        "TEAMS_FILE": str(teams),
        "OMP_WAIT_POLICY": "active",  # with edgelm's own, a second team may be what lets the threads sleep
    }
    environment.pop("OMP_NUM_THREADS", None)
    with serving(environment, models / "long.gguf", log=tmp_path / "log") as front:
        reply = front.chat("long", max_tokens=32)
        assert reply.is_success, reply.text
        assert front.http.post("/v1/embeddings", json={"model": "long", "input": "a text"}).is_success
        reply = front.chat("long", max_tokens=32)
        assert reply.is_success, reply.text
    counts = [int(line) for line in teams.read_text().splitlines()]
    assert len(counts) >= 2, "one team has measured, one has answered"
    assert max(counts) == 1
