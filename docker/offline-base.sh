#!/bin/bash
# Make the images' base from Debian packages, where no image registry is reached. Needs root, a
# Debian mirror and a running engine; installs debootstrap where it is missing.
set -euo pipefail

name=${1:-fedsilo-base:bookworm}
mirror=${2:-http://deb.debian.org/debian}

fail() {
    echo "offline-base.sh: $*" >&2
    exit 2
}

[ "$(id -u)" = 0 ] || fail "debootstrap needs root"
docker info >/dev/null 2>&1 || fail "no engine answers; docker/start-engine.sh starts one"
if ! command -v debootstrap >/dev/null; then
    command -v apt-get >/dev/null || fail "debootstrap must be installed, and there is no apt-get"
    said=$(apt-get update 2>&1 && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends debootstrap 2>&1) ||
        fail "apt-get install debootstrap failed: $(tail -n 3 <<<"$said")"
fi

root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
said=$(debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    bookworm "$root" "$mirror" 2>&1) || fail "debootstrap failed: $(tail -n 3 <<<"$said")"

# An institution's own authority, by which pip reaches its registry, is in the host's bundle alone
if [ -r /etc/ssl/certs/ca-certificates.crt ]; then
    cp --remove-destination /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
fi
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
# The host's names and addresses are none of the image's business; the engine writes its own
: >"$root/etc/resolv.conf"
rm -f "$root/etc/hostname"
tar -C "$root" --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' -c . |
    docker import - "$name" >/dev/null
docker image inspect --format "$name: {{.Size}} bytes" "$name"
