#!/usr/bin/env bash
# Run every check that the kernels need a GPU for: tests, assembly against its plain twins, machine code and benchmark.
#
#     packaging/gpu_kernels.sh FOLDER [--tiny] [STEP...]
#
# Steps: twins tiny bench tune suite sass (default: all). Each writes FOLDER/STEP.txt; the benchmark also writes
# bench.jsonl. --tiny: only small cases, a dry run without a GPU. PYTHON names the interpreter (.venv/bin/python), LIMIT_S
# the time limit of a step (540), JOBS the number of compilers at once, SHAPES the shapes to tune.
# All need torch, triton and numpy; suite also needs pytest and hypothesis.
# A failed step does not stop the others; the exit code is 1 if any step failed.
set -uo pipefail
cd "$(dirname "$0")/.."

folder=${1:?usage: packaging/gpu_kernels.sh FOLDER [--tiny] [STEP...]}
shift
tiny=
if [ "${1:-}" = --tiny ]; then tiny=--tiny; shift; fi
steps=${*:-twins tiny bench tune suite sass}
python=${PYTHON:-.venv/bin/python}
limit=${LIMIT_S:-540}
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN)}
shapes=${SHAPES:-4096x4096 14336x4096 4096x14336 1024x4096 128256x4096}
formats="q4_0 q4_k q6_k q8_0"
mkdir -p "$folder"
unset TRITON_INTERPRET
export PYTHONUNBUFFERED=1

# The tests of ops create all tensors by torch, so KERNEL_DEVICE moves them to the GPU. pytest does not read our
# settings, because they name plugins that are not needed here.
suite() {
    local device=cuda parallel=() tests=()
    for op in activation attention bandwidth cache dequant_gemm dequantize embedding grouped matmul norm route trial \
        write_kv; do
        tests+=("tests/kernels/test_$op.py")
    done
    if [ -n "$tiny" ]; then device=cpu tests+=(-k "reference or bandwidth"); fi
    if "$python" -c 'import xdist' 2>/dev/null; then parallel=(-n "$jobs"); fi
    KERNEL_DEVICE=$device bounded -m pytest -q -c /dev/null --rootdir . -o pythonpath=. --import-mode=importlib \
        -p no:cacheprovider "${parallel[@]}" "${tests[@]}"
}

# All configurations of a matmul: compiled by many processes at once (their times are useless), then timed by one.
tune() {
    local shape format not_timed
    not_timed=$(mktemp -d)
    if [ -n "$tiny" ]; then shapes=$("$python" -c "$first_tiny_shape"); fi
    for shape in $shapes; do
        for format in $formats; do
            echo "--shapes $shape --formats $format --tune $not_timed/$shape-$format"
        done
    done | timeout $((limit * 3 / 5)) xargs -P "$jobs" -L 1 "$python" -m tests.kernels.bench $tiny --ops matmul > /dev/null
    rm -r "$not_timed"
    LIMIT_S=$((limit * 2 / 5)) bounded -m tests.kernels.bench $tiny --ops matmul --shapes $shapes --formats $formats \
        --tune "$folder/tuned" --out "$folder/tuned.jsonl"
}
first_tiny_shape='import tests.kernels.benchmark as b; print(b.bench_cases(["matmul"], True)[0].shape)'

bounded() {
    timeout "${LIMIT_S:-$limit}" "$python" "$@"
}

{
    echo "commit: $(git rev-parse HEAD 2>/dev/null || echo unknown)"
    echo "date: $(date -u +%Y-%m-%dT%H:%MZ)"
    echo "system: $(uname -srm), $(getconf _NPROCESSORS_ONLN) cores"
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit --format=csv 2>/dev/null || echo "no GPU"
    "$python" -c 'import edgelm.kernels.gpu_target as t, torch; print(t.target_of(torch.device("cuda" if torch.cuda.is_available() else "cpu")))'
} | tee "$folder/machine.txt"

failed=
for step in $steps; do
    begun=$(date +%s)
    case $step in
        suite) suite ;;
        sass) bounded -m tests.kernels.sass ${tiny:+--main --targets 90} ;;
        twins) if [ -n "$tiny" ]; then echo "a dry run: assembly needs a GPU"; else bounded -m tests.kernels.twins; fi ;;
        tiny) bounded -m tests.kernels.bench --tiny --out "$folder/tiny.jsonl" ;;
        bench) bounded -m tests.kernels.bench $tiny --out "$folder/bench.jsonl" ;;
        tune) tune ;;
        *) echo "no such step: $step"; false ;;
    esac 2>&1 | tee "$folder/$step.txt"
    code=$?
    echo "$step: exit code $code, $(($(date +%s) - begun)) s" | tee -a "$folder/machine.txt"
    [ $code -eq 0 ] || failed="$failed $step"
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
