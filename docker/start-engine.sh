#!/bin/bash
# Start a container engine where none runs: Debian's docker.io and docker-compose, as root, in the
# background. Prints the process id that ends it. Does nothing where one answers already.
set -euo pipefail

log=${1:-/var/log/fedsilo-dockerd.log}

fail() {
    echo "start-engine.sh: $*" >&2
    exit 2
}

if docker info >/dev/null 2>&1; then
    echo "an engine answers already"
    exit 0
fi
[ "$(id -u)" = 0 ] || fail "no engine answers and starting one needs root"
missing=()
command -v dockerd >/dev/null || missing+=(docker.io iptables)
command -v docker-compose >/dev/null || docker compose version >/dev/null 2>&1 || missing+=(docker-compose)
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || fail "${missing[*]} must be installed, and there is no apt-get"
    said=$(apt-get update 2>&1 && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends "${missing[@]}" 2>&1) ||
        fail "apt-get install ${missing[*]} failed: $(tail -n 3 <<<"$said")"
fi
nohup dockerd >"$log" 2>&1 &
pid=$!
for _ in $(seq 60); do
    if docker info >/dev/null 2>&1; then
        echo "engine started, process $pid, log $log; kill $pid ends it"
        exit 0
    fi
    kill -0 "$pid" 2>/dev/null || fail "dockerd ended: $(tail -n 3 "$log")"
    sleep 1
done
kill "$pid"
fail "dockerd did not answer within 60 s; see $log"
