"""Which test files begin first: those that take longest. At the end of a run, each would leave the other cores idle.

The seconds of tests: docs/results/tests-2026-11-28.txt.
"""

from __future__ import annotations

LONG_FILES = (
    "tests/tui/test_mouse.py",
    "tests/commands/test_run.py",
    "tests/server/test_serve.py",
    "tests/commands/test_launch.py",
    "tests/commands/test_torch_engine.py",
    "tests/commands/test_bench.py",
    "tests/commands/test_eval.py",
    "tests/server/test_kills.py",
    "tests/tui/test_snapshots.py",
    "tests/tui/test_plain.py",
    "tests/commands/test_run_answers.py",
    "tests/commands/test_quantize.py",
    "tests/server/test_gpu_failures.py",
    "tests/server/test_saving.py",
    "tests/server/test_forced_calls.py",
    "tests/server/test_chat_answers.py",
    "tests/server/test_changing_file.py",
    "tests/server/test_many_models.py",
    "tests/tui/test_own_front.py",
    "tests/tui/test_chatting.py",
    "tests/tui/test_tools.py",
    "tests/tui/test_knowledge.py",
    "tests/tui/test_files.py",
    "tests/tui/test_commands.py",
    "tests/tui/test_chat_list.py",
    "tests/server/test_remote_kills.py",
    "tests/server/test_soak_streams.py",
    "tests/server/test_connections.py",
    "tests/server/test_events.py",
    "tests/server/test_frozen.py",
    "tests/commands/test_pull.py",
    "tests/commands/test_show.py",
    "tests/kernels/test_triton_releases.py",
    "tests/backends/torch/test_compiling.py",
    "tests/backends/torch/test_warm_up.py",
    "tests/kernels/test_sass.py",
    "tests/backends/torch/test_fake_gpu.py",
    "tests/kernels/test_attention.py",
    "tests/kernels/emulated/test_cases.py",
    "tests/kernels/emulated/test_models.py",
    "tests/backends/torch/test_self_check.py",
    "tests/text/test_template_worker.py",
    "tests/library/test_pull_faults.py",
    "tests/kernels/test_dequant_gemm.py",
    "tests/kernels/emulated/test_mutations.py",
    "tests/kernels/emulated/test_older_triton.py",
    "tests/models/test_starter.py",
    "tests/jobs/test_structured_answers.py",
    "tests/backends/torch/test_executor.py",
    "tests/backends/torch/test_heads.py",
    "tests/backends/torch/test_fake_gpu_failures.py",
    "tests/backends/torch/test_load_tuning.py",
    "tests/backends/torch/test_row_counts.py",
    "tests/backends/llama/test_speculation.py",
    "tests/backends/llama/test_heads.py",
    "tests/backends/llama/test_draft_kills.py",
    "tests/backends/llama/test_draft_workloads.py",
    "tests/engine/speculation/test_drafting_properties.py",
    "tests/checkpoints/test_gguf_fuzz.py",
    "tests/engine/test_scheduler_properties.py",
    "tests/engine/sampling/test_reference.py",
)
_PLACES = {name: place for place, name in enumerate(LONG_FILES)}


def place_of_file(nodeid: str) -> int:
    """Return the place of a test's file among all: a key for a stable sort."""
    return _PLACES.get(nodeid.partition("::")[0], len(_PLACES))
