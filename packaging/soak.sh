#!/usr/bin/env bash
# Runs the tests with the big counts, part by part, and keeps what each part was run on and what it printed.
#
#     packaging/soak.sh [PART ...]           (a name below, or a path of tests; without: all but `emulated`)
#     packaging/soak.sh list                 (the parts, and what pytest gets for each)
#     packaging/soak.sh vulkan [FOLDER]      (of `make dist VULKAN=1`; without it, npm's build of llama.cpp)
#
# build/soak/ has the whole output of each part and a record of every run; docs/results/soak-DATE.txt is all records, so a
# part that is repeated, or run tomorrow, is added to the others. JOBS=2 runs two processes where no test waits on a clock.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = vulkan ]; then  # llama.cpp's GPU side on a software device; downloads 33 MB
    mkdir -p docs/results
    exec .venv/bin/python packaging/vulkan_check.py ${2:+--wheels "$2"} --out "docs/results/vulkan-lavapipe-$(date -u +%Y-%m-%d).txt"
fi

PARTS="engine mutations checkpoints sampling text chats library jobs models conversion backends kernels triton others server commands tui"
LONG=emulated  # hours: only where it is named
ONE_PROCESS=" server commands tui "  # they wait for processes, sockets and screens
TIMEFORMAT='%R %U %S'

paths() {  # of a part; `others` is every test that no other part has
    case $1 in
        engine) echo tests/engine --ignore=tests/engine/sampling ;;
        sampling) echo tests/engine/sampling ;;
        jobs) echo tests/jobs tests/evaluation ;;
        conversion) echo tests/making ;;
        kernels) echo tests/kernels --ignore=tests/kernels/emulated --ignore=tests/kernels/test_triton_releases.py ;;
        triton) echo tests/kernels/test_triton_releases.py ;;
        emulated) echo tests/kernels/emulated ;;
        others)
            echo tests
            for part in $PARTS; do
                case $part in others | mutations) ;; *) paths "$part" | tr ' ' '\n' | sed -n 's/^tests/--ignore=&/p' ;; esac
            done ;;
        tests/*) echo "$1" ;;
        *) echo "tests/$1" ;;
    esac
}

command_of() {
    local jobs=()
    if [ "$1" = mutations ]; then
        echo -m tests.engine.mutations
        return
    fi
    [ "${JOBS:-1}" = 1 ] || [[ $ONE_PROCESS == *" $1 "* || $1 == tests/* ]] || jobs=(-n "$JOBS" --dist loadfile)
    # shellcheck disable=SC2046
    echo -m pytest --soak --timeout=14400 --durations=8 -rfEP "${jobs[@]}" $(paths "$1")
}

counts() {  # the big counts of a part's files: NAME NUMBER, …
    local path ignored=tests/counts.py found=()
    for path in $(paths "$1"); do
        case $path in --ignore=*) ignored+="|${path#--ignore=}" ;; *) found+=("${path%%::*}") ;; esac
    done
    { grep -HroE --include='*.py' '(timeout\(|[A-Za-z_]+ ?= ?)?Count\(test=[^=]*, soak=[^)]*\)' "${found[@]}" || true; } \
        | grep -vE "^($ignored)|timeout|LIMIT|limit_s|soak=1\)" \
        | sed -E 's/ ?= ?Count\(/ /; s/Count\(//; s/test=.*soak=//; s/\)$//' \
        | awk -F: '{ printf "%s%s", $1 == last ? "," : (NR > 1 ? "\n" : "") $1 ":", " " $2; last = $1 } END { if (NR) print "" }' \
        || true
}

if [ "${1:-}" = list ]; then
    for part in $PARTS $LONG; do echo "$part: $(command_of "$part")"; done
    exit
fi

summary() {  # the last line that pytest or the mutations end with: threads may complain after it
    { grep -E '^=+ .* in [0-9.]+s|^[0-9]+ mutations' "$1" || tail -n 1 "$1"; } | tail -n 1 | tr -d =
}

run_part() {
    local name=build/soak/${1//\//-} began commit changed command code=0 real user system
    local log=$name.log
    began=$(date -u +%Y-%m-%dT%H:%MZ)
    commit=$(git rev-parse --short=10 HEAD 2>/dev/null || echo unknown)
    changed=$(git status --porcelain --untracked-files=no 2>/dev/null | wc -l | tr -d ' ')
    command=$(command_of "$1")
    echo "== $1: python $command"
    # shellcheck disable=SC2086
    { time .venv/bin/python $command > "$log" 2>&1 || code=$?; } 2> "$name.time"
    read -r real user system < "$name.time"
    {
        echo "== $1: $(summary "$log")"
        echo "$began, commit $commit, $changed files changed since;" \
            "$real s, of a processor $user + $system s; load at the end $(cut -d ' ' -f 1-2 /proc/loadavg 2>/dev/null || uptime)"
        echo "python $command" | sed -E 's/( --ignore=[^ ]*)+$/ (without the folders of other parts)/'
        grep -E '^(FAILED|ERROR) tests/|survived$' "$log" || true
        [ "$1" = mutations ] || counts "$1"
        grep -E '^[0-9][0-9,]* (mutants|clients|connections|requests|streams|kills)' "$log" || true
        grep -E '^ *[0-9.]+s (call|setup|teardown)' "$log" | head -n 4 || true
        echo
    } | tee -a "$name.txt"
    return "$code"
}

report() {
    local part records
    echo "The tests with their big counts: packaging/soak.sh, $(date -u +%Y-%m-%d)"
    echo "system: $(uname -srm), $(getconf _NPROCESSORS_ONLN) cores"
    echo "python: $(.venv/bin/python -c 'import platform; print(platform.python_version())')"
    echo "packages: $(.venv/bin/pip list --format=freeze 2>/dev/null \
        | grep -iE '^(edgelm|numpy|llama.cpp.python|gguf|pytest|hypothesis|torch|triton)==' | paste -sd ' ' -)"
    for part in $PARTS $LONG; do
        [ -f "build/soak/$part.txt" ] || echo "not run: $part"
    done
    echo
    for part in $PARTS $LONG; do
        [ ! -f "build/soak/$part.txt" ] || cat "build/soak/$part.txt"
    done
    records=$(find build/soak -name 'tests-*.txt' | sort)
    [ -z "$records" ] || cat $records
}

mkdir -p docs/results build/soak
failed=
for part in ${*:-$PARTS}; do
    if [ "$part" = triton ] && ! make --no-print-directory triton; then  # without the releases, its tests are skipped
        failed+=" $part"
        continue
    fi
    run_part "$part" || failed+=" $part"
    report > "docs/results/soak-$(date -u +%Y-%m-%d).txt"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
