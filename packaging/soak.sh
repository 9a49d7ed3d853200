#!/usr/bin/env bash
# Runs the tests with the big counts, and keeps the output with what it was measured on.
#
#     packaging/soak.sh [PYTEST ARGUMENTS]
#     packaging/soak.sh vulkan [FOLDER]      (of `make dist VULKAN=1`; without it, npm's build of llama.cpp)
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p docs/results
if [ "${1:-}" = vulkan ]; then  # llama.cpp's GPU side on a software device; downloads 33 MB
    exec .venv/bin/python packaging/vulkan_check.py ${2:+--wheels "$2"} --out "docs/results/vulkan-lavapipe-$(date -u +%Y-%m-%d).txt"
fi
result=docs/results/soak-$(date -u +%Y-%m-%d).txt
EMULATED_LINES=$(mktemp)  # of the emulated kernels, for their table
export EMULATED_LINES
changed=$(git status --porcelain --untracked-files=no 2>/dev/null | wc -l | tr -d ' ')
{
    echo "commit: $(git rev-parse HEAD 2>/dev/null || echo unknown), $changed files changed since"
    echo "date: $(date -u +%Y-%m-%dT%H:%MZ)"
    echo "system: $(uname -srm), $(getconf _NPROCESSORS_ONLN) cores"
    echo "python: $(.venv/bin/python -c 'import platform; print(platform.python_version())')"
    echo "packages: $(.venv/bin/pip list --format=freeze 2>/dev/null \
        | grep -iE '^(edgelm|numpy|llama.cpp.python|gguf|pytest|hypothesis)==' | paste -sd ' ' -)"
    echo
    .venv/bin/python -m pytest --soak --timeout=14400 --durations=15 "$@"
    echo
    .venv/bin/python -m tests.engine.mutations
    echo
    .venv/bin/python -m tests.kernels.emulated.table "$EMULATED_LINES"
} 2>&1 | tee "$result"
