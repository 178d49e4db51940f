#!/usr/bin/env bash
# The stages of the GPU kit: run on the borrowed machine, in the tree that was copied to it.
#
#   bash benchmarks/gpu_kit/on_device.sh STAGE...
#
#   setup            unpack packages and data, show versions, import every module
#   tests            what `make test-gpu` runs
#   steps            training steps: gpu_steps.py, attention.py, radiographs.py
#   modes            gpu_steps.py --modes: UEFL's network at the paper's size by several settings
#   engines          gpu_engines.py: six methods by each engine (ONLY="fedavg uefl" for some)
#   paper:PLAN       the runs of a plan of plans.py; finished ones are kept, an interrupted one goes on
#   beside:PLAN,...  plans for the processor's cores, in the background of the stages that follow
#
# Each stage unpacks what it needs. LIMIT (570) is how many seconds the whole call may take. SEEDS (3)
# and JOBS (2 runs at once) are of paper plans, CPU_SEEDS (20) and CORES (10) of those beside them.
# MODE are settings of the paper plans, such as machine.deterministic=false. To try the kit where there
# is no GPU: DEVICE=cpu, and SMALL="KEY=VALUE ..." settings that make each run tiny. Results are in
# $OUT, at most eight files.
set -u
cd "$(dirname "$0")/../.."
kit=benchmarks/gpu_kit
WORK=${WORK:-${TMPDIR:-/tmp}/fedsilo-gpu}
OUT=${OUT:-$WORK/out}
LIMIT=${LIMIT:-570}
PY=${PY:-python3}
DEVICE=${DEVICE:-cuda}
MODE=${MODE:-}
SMALL=${SMALL:-}
mkdir -p "$OUT" "$WORK/data" "$WORK/runs"
log=$OUT/log.txt
: >"$log"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 NO_COLOR=1 COLUMNS=150
export FEDSILO_CACHE="$WORK/cache" FEDSILO_DATA="$WORK/data"
status=0

# limit SECONDS NAME COMMAND...: run it, logged, for at most so long and not beyond the call's end
limit() {
    local most=$1 name=$2 left=$((LIMIT - SECONDS)) began=$SECONDS code
    shift 2
    [ "$left" -lt "$most" ] && most=$left
    if [ "$most" -lt 10 ]; then
        echo "== $name: no time left" | tee -a "$log"
        return 124
    fi
    echo "== $name (at most $most s): $*" | tee -a "$log" | cut -c1-250
    # A command in the background of a script ignores the interrupt unless it is told not to
    timeout --signal INT --kill-after 10 "$most" env --default-signal=INT "$@" >>"$log" 2>&1 </dev/null
    code=$?
    echo "== $name: exit code $code after $((SECONDS - began)) s" | tee -a "$log"
    [ "$code" -eq 0 ] || grep -av "^== " "$log" | tail -n 3 | cut -c1-250
    return "$code"
}

unpack() {
    local version folder
    version=$("$PY" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 1
    if [ "$version" != 3.12 ]; then
        echo "the packages in .whl are for Python 3.12, and this is $version: its own are used"
    elif [ -e .whl/site.tar.xz ] && [ ! -e "$WORK/site/.ready" ]; then
        rm -rf "$WORK/site" && mkdir "$WORK/site"
        tar xJf .whl/site.tar.xz -C "$WORK/site" && touch "$WORK/site/.ready" || exit 1
    fi
    export PYTHONPATH="$PWD"
    [ -e "$WORK/site/.ready" ] && PYTHONPATH="$WORK/site:$PWD"
    # Files keep their times, by which caches know them
    for folder in .gpudata-*; do
        if [ -e "$folder/signs.tar.xz" ]; then
            [ -d "$WORK/data/GTSRB" ] || "$PY" -c "import sys, tarfile; tarfile.open(sys.argv[1], 'r:xz').extractall(sys.argv[2], filter='tar')" \
                "$folder/signs.tar.xz" "$WORK/data" || exit 1
        elif [ -d "$folder" ]; then
            cp -rpn "$folder/." "$WORK/data/"
        fi
    done
    cat simulation.yaml "$kit/experiments.yaml" >"$WORK/simulation.yaml"
    # A later command may come without .whl
    [ -e .whl/lite0.safetensors ] && cp -p .whl/lite0.safetensors "$WORK/data/"
    [ -e .whl/revision ] && cp .whl/revision "$WORK/revision"
    [ -d .whl/runs ] && cp -rpn .whl/runs/. "$WORK/runs/"
    FEDSILO_REVISION=$(cat "$WORK/revision" 2>/dev/null || echo unknown)
    export FEDSILO_REVISION
}

# table FILE: print what a benchmark wrote
table() { [ -e "$OUT/$1" ] && echo "--- $1" && cat "$OUT/$1"; }

setup() {
    command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    limit 120 packages "$PY" "$kit/packages.py" check
    local code=$?
    grep -aE "^Python|^  |faults of" "$log" | cut -c1-300
    return "$code"
}

tests() {
    local files
    files=$(sed -n '/^test-gpu:/,/^$/p' Makefile | grep -oE 'tests/[^ ]+')
    # shellcheck disable=SC2086  # several files
    limit 330 tests "$PY" -m pytest $files -q --numprocesses "${CORES:-12}" --dist load -p no:cacheprovider --durations 10
    local code=$?
    grep -aE "^(FAILED|ERROR)|passed|failed|skipped|no tests ran" "$log" | cut -c1-220 | tail -n 40
    return "$code"
}

steps() {
    local small=() pixels=() code=0
    [ -n "$SMALL" ] && small=(--small) && pixels=(--size 64)
    limit 200 gpu_steps "$PY" benchmarks/gpu_steps.py --csv "$OUT/gpu-steps.csv" --device "$DEVICE" "${small[@]}" || code=$?
    limit 120 attention "$PY" benchmarks/attention.py throughput --csv "$OUT/attention-gpu.csv" --device "$DEVICE" "${small[@]}" || code=$?
    limit 90 radiographs "$PY" benchmarks/radiographs.py gpu --csv "$OUT/radiographs-gpu.csv" --device "$DEVICE" "${pixels[@]}" || code=$?
    table gpu-steps.csv
    table attention-gpu.csv
    table radiographs-gpu.csv
    return "$code"
}

modes() {
    local small=() code
    [ -n "$SMALL" ] && small=(--small)
    limit 120 modes "$PY" benchmarks/gpu_steps.py --modes --csv "$OUT/gpu-modes.csv" --device "$DEVICE" "${small[@]}"
    code=$?
    table gpu-modes.csv
    return "$code"
}

engines() {
    local small=() only=() code
    [ -n "$SMALL" ] && small=(--small)
    # shellcheck disable=SC2206  # several methods
    [ -n "${ONLY:-}" ] && only=(--only $ONLY)
    limit 560 engines "$PY" benchmarks/gpu_engines.py --csv "$OUT/engines-gpu.csv" --device "$DEVICE" \
        --seconds "$((LIMIT - SECONDS - 15))" "${small[@]}" "${only[@]}"
    code=$?
    table engines-gpu.csv
    return "$code"
}

# plan NAME OPTION...: run the commands that plans.py prints for it, until one fails
plan() {
    local name=$1 line lines words change
    shift
    local given=("$@")
    for change in $SMALL; do given+=(--set "$change"); done
    lines=$("$PY" "$kit/plans.py" "$name" --work "$WORK" "${given[@]}") || return 2
    while read -r line; do
        eval "words=($line)" # quoted by plans.py
        limit 10000 "$name" "$PY" -m fedsilo.cli "${words[@]}" || return
    done <<<"$lines"
}

paper() {
    local settings=() change
    for change in $MODE; do settings+=(--set "$change"); done
    plan "$1" --device "$DEVICE" --seeds "${SEEDS:-3}" --jobs "${JOBS:-2}" "${settings[@]}"
}

beside() { # without the GPU, and into a log of its own
    export CUDA_VISIBLE_DEVICES=
    log=$WORK/beside.txt
    : >"$log"
    local name
    for name in ${1//,/ }; do
        plan "$name" --device cpu --seeds "${CPU_SEEDS:-20}" --jobs "${CORES:-10}"
    done
}

# collect: the runs without weights and pictures, and the table of each plan
collect() {
    tar cJf "$OUT/runs.tar.xz" --exclude '*.safetensors' --exclude '*.png' --exclude checkpoints --exclude sites -C "$WORK" runs
    local csv
    for csv in "$WORK"/runs/*.csv; do
        case $csv in *'*.csv' | *-budgets.csv | *-tests.csv) continue ;; esac
        echo "--- $(basename "$csv")"
        grep -E "^experiment|,(accuracy|entropy|auc|average-precision|own-accuracy|own-labels-accuracy)," "$csv" | cut -d, -f1,3-9
    done
}

[ $# -gt 0 ] || { sed -n '2,20p' "$0"; exit 2; }
unpack
if command -v nvidia-smi >/dev/null; then # the GPU's use, once a second
    nvidia-smi --query-gpu=timestamp,name,utilization.gpu,memory.used,power.draw,clocks.sm --format=csv,nounits -l 1 >"$OUT/gpu.csv" &
    watcher=$!
fi
for stage in "$@"; do
    case $stage in
    setup | tests | steps | modes | engines) "$stage" || status=$? ;;
    paper:*) paper "${stage#paper:}" || status=$? ;;
    beside:*)
        (beside "${stage#beside:}") >"$WORK/beside-lines.txt" 2>&1 &
        background=$!
        ;;
    *) echo "there is no stage '$stage'" >&2; status=2 ;;
    esac
done
if [ -n "${background:-}" ]; then
    wait "$background" || status=$?
    cat "$WORK/beside-lines.txt" "$WORK/beside.txt" >>"$log"
    cat "$WORK/beside-lines.txt"
fi
[ -n "${watcher:-}" ] && kill "$watcher"
case " $* " in *" paper:"* | *" beside:"*) collect ;; esac
ls -l "$OUT" | awk 'NR > 1 {print $5, $9}'
echo "== all after $SECONDS s, exit code $status"
exit "$status"
