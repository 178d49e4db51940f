#!/bin/bash
# Register the public keys of a folder of make-secrets.sh at the running server, revoke one, or list
# them. It runs docker/hospitals.py in the server's container: who may do that may admit hospitals.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: register.sh [--secrets DIR] [NAME ...]   all of DIR's keys, or those named
       register.sh --revoke NAME
       register.sh --list

COMPOSE is the command that reaches the federation (docker-compose -f docker/compose.yaml).
TEXT
}

fail() {
    echo "register.sh: $*" >&2
    exit 2
}

here=$(cd "$(dirname "$0")" && pwd)
read -ra compose <<<"${COMPOSE:-docker-compose -f $here/compose.yaml}"

in_server() {
    "${compose[@]}" exec -T server python /opt/fedsilo/hospitals.py "$@"
}

secrets=${FEDSILO_SECRETS:-$here/secrets} names=()
while [ $# -gt 0 ]; do
    case "$1" in
    --secrets | --revoke) [ $# -ge 2 ] || fail "$1 needs a value" ;;&
    --secrets) secrets=$2 && shift ;;
    --revoke) in_server revoke "$2" </dev/null && exit 0 || exit 2 ;;
    --list) in_server list </dev/null && exit 0 || exit 2 ;;
    -h | --help) usage && exit 0 ;;
    -*) fail "no such option: $1 (see --help)" ;;
    *) names+=("$1") ;;
    esac
    shift
done
if [ ${#names[@]} -eq 0 ]; then
    for file in "$secrets"/*.pub; do
        [ -e "$file" ] || fail "$secrets holds no public key; make-secrets.sh makes them"
        names+=("$(basename "$file" .pub)")
    done
fi
for name in "${names[@]}"; do
    [ -r "$secrets/$name.pub" ] || fail "$secrets/$name.pub is missing or not readable"
done
for name in "${names[@]}"; do
    in_server register "$name" <"$secrets/$name.pub"
done
