#!/bin/bash
# Try a federation in containers: one server and six hospitals train UEFL on the embedded digits.
#   docker/try.sh [cpu|gpu] [FOLDER]
# Prints a line a step and the run's table. The run directory is copied to FOLDER, if one is given.
# Containers, networks and volumes are removed at the end; the images stay, so the next time is
# faster. Without an argument a GPU is used if the engine offers one. Variables of docs/docker.md,
# such as BASE, SERVER_LOCK and HOSPITAL_LOCK, are obeyed; TIMES=FILE writes the seconds of each step
# as CSV. Needs an engine (docker/start-engine.sh).
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
project=fedsilo-try
sites=(s1a s1b s2a s2b s3a s3b) # the names of six silos of digits
hospitals=(hospital-{1..6})
limit=${LIMIT:-600} # seconds for the containers to become healthy

fail() {
    echo "try.sh: $*" >&2
    exit 2
}

# Say what begins now: the step's name in TIMES, then the line. Notes how long the step before took
phase=""
began=0
step() {
    if [ -n "$phase" ] && [ -n "${TIMES:-}" ]; then
        [ -s "$TIMES" ] || echo "step,seconds" >"$TIMES"
        echo "$phase,$((SECONDS - began))" >>"$TIMES"
    fi
    phase=$1
    began=$SECONDS
    shift
    printf '[%4d s] %s\n' "$SECONDS" "$*"
}

# Run a command quietly; after a failure print the end of what it said
quiet() {
    "$@" >"$folder/log" 2>&1 || fail "'$*' failed: $(tail -n 5 "$folder/log")"
}

compose() { "${command[@]}" -p "$project" -f "$here/$file" "$@"; }

container() {
    docker ps -aq --filter "label=com.docker.compose.project=$project" \
        --filter "label=com.docker.compose.service=$1"
}

# Print a container's health, and what its newest check said: the fault, if it cannot start
health() {
    docker inspect --format '{{.State.Health.Status}}{{range .State.Health.Log}}{{"\n"}}{{.Output}}{{end}}' \
        "$(container "$1")" | awk 'NR == 1 {status = $0} NF {newest = $0} END {print status, newest}'
}

# A machine that is busy makes a container unhealthy for a while; only a fault ends the wait
wait_for() {
    local service end=$((SECONDS + limit)) state
    for service in "$@"; do
        while state=$(health "$service") && [[ $state != healthy* ]]; do
            case $state in
            "unhealthy hospital: "* | "unhealthy server: "*) fail "$service cannot start: ${state#unhealthy *: }" ;;
            esac
            [ "$SECONDS" -lt "$end" ] || fail "$service did not become healthy in $limit s: $state"
            sleep 1
        done
    done
}

clean() {
    compose down --volumes --remove-orphans --timeout 10 >"$folder/log" 2>&1 || cat "$folder/log" >&2
}

finish() {
    step remove "removing the containers, networks and volumes of $project; the images stay"
    clean
    rm -rf "$folder"
    step end "all is removed"
}

main() {
    local device=${1:-} out=${2:-} number server
    case $device in
    "" | cpu | gpu) ;;
    *) fail "'$1' is not a device: docker/try.sh [cpu|gpu] [FOLDER]" ;;
    esac
    [ -z "$out" ] || [ ! -e "$out" ] || fail "$out exists already: name a new folder"
    command -v docker >/dev/null || fail "docker is not installed: as root, docker/start-engine.sh installs and starts it"
    docker info >/dev/null 2>&1 || fail "no engine answers: start yours, or as root docker/start-engine.sh"
    if command -v docker-compose >/dev/null; then
        command=(docker-compose)
    elif docker compose version >/dev/null 2>&1; then
        command=(docker compose)
    else
        fail "docker compose is missing: as root, docker/start-engine.sh installs it"
    fi
    if [ -z "$device" ]; then
        device=cpu
        if docker info --format '{{json .Runtimes}}' | grep -q nvidia && nvidia-smi >/dev/null 2>&1; then
            device=gpu
        fi
    fi
    file=compose.yaml
    [ "$device" = gpu ] || file=compose.cpu.yaml

    exec 9>"${TMPDIR:-/tmp}/fedsilo-try.lock"
    flock -n 9 || fail "another docker/try.sh is running: wait for its end"
    folder=$(mktemp -d)
    export FEDSILO_TAG=${FEDSILO_TAG:-try} FEDSILO_TRUST=server FEDSILO_KITS=$folder/kits FEDSILO_HOST=server
    for number in "${!sites[@]}"; do
        # Digits ship with the images: no folder of data, and no site file, whatever the shell exports
        export "SITE_$((number + 1))=${sites[number]}" "DATA_$((number + 1))=" "SITE_FILE_$((number + 1))="
    done
    trap finish EXIT
    trap 'exit 130' INT TERM
    clean # what a killed try left

    if [ -z "${BASE:-}" ] && ! docker image inspect python:3.11-slim-bookworm >/dev/null 2>&1 &&
        ! docker pull --quiet python:3.11-slim-bookworm >/dev/null 2>&1; then
        export BASE=fedsilo-base:bookworm BUILD_NETWORK=host
        if ! docker image inspect "$BASE" >/dev/null 2>&1; then
            step base "making the base image from Debian packages, because no image registry is reached"
            quiet "$here/offline-base.sh" "$BASE"
        fi
    fi
    step build "building the images for server and hospitals ($device); minutes at the first time"
    quiet compose build server hospital-1
    step server "starting the server, which makes its certificate"
    quiet compose up -d --no-build server
    wait_for server
    step admit "admitting six hospitals: ${sites[*]}"
    server=$(container server)
    quiet docker exec "$server" fedsilo deploy add "${sites[@]}" --deployment /state
    quiet docker cp "$server:/state/kits" "$FEDSILO_KITS"
    # The images' user must own the kits; only root may give files away, so a container does
    quiet docker run --rm --network none --user 0 --entrypoint sh -v "$FEDSILO_KITS:/kits" \
        "fedsilo-hospital:$FEDSILO_TAG" -c "chown 10001:10001 /kits/*.zip"
    step hospitals "starting the hospitals, each on a network of its own"
    quiet compose up -d --no-build
    wait_for "${hospitals[@]}"
    step run "training UEFL on digits, with one silo at each hospital"
    docker exec "$server" fedsilo deploy run uefl-digits --deployment /state \
        --set split.silos=6 --set run.min-sites=6 --name try || fail "the run failed"
    if [ -n "$out" ]; then
        quiet docker cp "$server:/state/server/runs/try" "$out"
        step copy "copied the run directory to $out"
    fi
}

main "$@"
