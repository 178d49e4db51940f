#!/bin/bash
# Make what a federation proves itself with: a certificate authority, the server's certificate, and
# one EC P-384 key per hospital in the OpenSSH form that Flower reads. Nothing is ever overwritten, a
# call that fails leaves nothing behind, and all files are readable by their owner alone.
set -euo pipefail
umask 077

usage() {
    cat <<'TEXT'
usage: make-secrets.sh --out DIR --host NAME [--host NAME ...] --hospital NAME [--hospital NAME ...]
                       [--days N] [--ca-days N] [--owner UID]
       make-secrets.sh --out DIR --renew-server [--host NAME ...] [--days N]
       make-secrets.sh --out DIR --add-hospital NAME [--add-hospital NAME ...]
       make-secrets.sh --out DIR --show

  --host          a name or address by which hospitals reach the server; localhost and 127.0.0.1,
                  which the server's own processes use, are always added
  --hospital      a hospital: DIR/NAME.key stays with it, DIR/NAME.pub is registered at the server
  --days          how long the server's certificate holds (365)
  --ca-days       how long the authority's holds (3650)
  --owner         who owns all files but ca.key; 10001 is the images' user, and root alone can give
                  files away
  --renew-server  a new certificate for the server's key, of the same authority; the host names stay
                  unless --host gives others
  --add-hospital  keys of one more hospital; certificates stay as they are
  --show          when the certificates end

Writes DIR/ca.crt, ca.key, server.crt, server.key, NAME.key, NAME.pub for each hospital, and
registry.json with the fingerprints of all of them, of which each hospital gets a copy.
Keep ca.key off the server: only renewal needs it.
TEXT
}

fail() {
    echo "make-secrets.sh: $*" >&2
    exit 2
}

out="" days=365 ca_days=3650 owner="" action=create
hosts=() hospitals=() added=()

parse() {
    while [ $# -gt 0 ]; do
        case "$1" in
        --out | --host | --hospital | --add-hospital | --days | --ca-days | --owner)
            [ $# -ge 2 ] || fail "$1 needs a value"
            ;;&
        --out) out=$2 && shift ;;
        --host) hosts+=("$2") && shift ;;
        --hospital) hospitals+=("$2") && shift ;;
        --add-hospital) added+=("$2") && action=add && shift ;;
        --days) days=$2 && shift ;;
        --ca-days) ca_days=$2 && shift ;;
        --owner) owner=$2 && shift ;;
        --renew-server) action=renew ;;
        --show) action=show ;;
        -h | --help) usage && exit 0 ;;
        *) fail "no such option: $1 (see --help)" ;;
        esac
        shift
    done
    [ -n "$out" ] || fail "--out DIR is missing (see --help)"
    check_days --days "$days"
    check_days --ca-days "$ca_days"
    [[ $owner =~ ^[0-9]*$ ]] || fail "--owner is $owner; it must be a user's number"
    check_names
}

check_days() {
    [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || fail "$1 is $2; it must be a whole number from 1 to 99999"
}

check_names() {
    local name seen=" ca server "
    for name in "${hospitals[@]}" "${added[@]}"; do
        [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$ ]] ||
            fail "hospital '$name': a name has letters, digits, - and _, and starts with a letter or digit"
        [[ $seen != *" $name "* ]] || fail "hospital '$name': given twice, or the name of another file"
        seen+="$name "
    done
    for name in "${hosts[@]}"; do
        [[ $name =~ ^(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,250}[A-Za-z0-9])?$ || $name =~ ^[0-9A-Fa-f:]*:[0-9A-Fa-f:]*$ ]] ||
            fail "host '$name': neither a host name nor an address"
    done
}

# The SAN line of the given hosts; the server's own processes reach it by localhost and 127.0.0.1.
alt_names() {
    local name line=""
    for name in localhost 127.0.0.1 "$@"; do
        if [[ $name =~ ^[0-9.]+$ || $name == *:* ]]; then
            name="IP:$name"
        else
            name="DNS:$name"
        fi
        [[ ",$line," == *",$name,"* ]] || line+="${line:+,}$name"
    done
    echo "$line"
}

# The message of a failed tool is shown; that of one which succeeds is noise.
quiet() {
    local said
    said=$("$@" 2>&1) || fail "$1 failed: ${said//$'\n'/; }"
}

new_key() {
    quiet openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-384 -out "$1"
}

make_authority() {
    new_key "$1/ca.key"
    quiet openssl req -x509 -new -sha384 -key "$1/ca.key" -days "$ca_days" -out "$1/ca.crt" \
        -subj "/CN=fedsilo certificate authority" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" \
        -addext "keyUsage=critical,keyCertSign,cRLSign"
}

# sign_server AUTHORITY-FOLDER KEY CERTIFICATE SAN-LINE
sign_server() {
    quiet openssl req -new -sha384 -key "$2" -subj "/CN=fedsilo server" -out "$work/server.csr"
    printf '%s\n' "subjectAltName=$4" "basicConstraints=critical,CA:FALSE" \
        "keyUsage=critical,digitalSignature" "extendedKeyUsage=serverAuth" \
        "authorityKeyIdentifier=keyid" >"$work/server.ext"
    quiet openssl x509 -req -sha384 -in "$work/server.csr" -CA "$1/ca.crt" -CAkey "$1/ca.key" \
        -set_serial "0x$(openssl rand -hex 16)" -days "$days" -extfile "$work/server.ext" -out "$3"
    rm "$work/server.csr" "$work/server.ext"
    # A certificate that outlives its authority would show an end that it never reaches
    [ "$(seconds_of "$3")" -le "$(seconds_of "$1/ca.crt")" ] ||
        fail "--days $days ends after the authority, which ends $(end_of "$1/ca.crt"); give fewer days"
}

make_hospital() {
    quiet ssh-keygen -q -t ecdsa -b 384 -N "" -C "$2" -f "$1/$2"
    mv "$1/$2" "$1/$2.key"
    chmod 600 "$1/$2.pub"
}

# registry.json: which key is whose, by the public keys of folders; hospitals check one another by it
write_registry() {
    local file line separator=""
    {
        printf '{'
        for file in "${@:2}"; do
            line=$(ssh-keygen -l -f "$file") || fail "$file: no public key"
            printf '%s\n  "%s": {"key": "%s"}' "$separator" "$(basename "$file" .pub)" "$(cut -d' ' -f2 <<<"$line")"
            separator=","
        done
        printf '\n}\n'
    } >"$1"
}

end_of() {
    openssl x509 -in "$1" -noout -enddate | cut -d= -f2
}

seconds_of() {
    date -d "$(end_of "$1")" +%s
}

show() {
    local file
    for file in ca server; do
        [ -r "$out/$file.crt" ] || fail "$out/$file.crt: no such certificate, or not readable"
    done
    for file in ca server; do
        echo "$out/$file.crt ends $(end_of "$out/$file.crt")"
    done
    echo "$out/server.crt holds for $(sans_of "$out/server.crt")"
}

sans_of() {
    openssl x509 -in "$1" -noout -ext subjectAltName | tail -n +2 | tr -d ' ' | sed 's/IPAddress:/IP:/g'
}

need_authority() {
    [ -r "$out/ca.key" ] && [ -r "$out/ca.crt" ] ||
        fail "$out: ca.crt or ca.key is missing or not readable; they are needed to $1"
}

create() {
    [ ${#hosts[@]} -gt 0 ] || fail "--host NAME is missing: by what name do hospitals reach the server?"
    [ ${#hospitals[@]} -gt 0 ] || fail "--hospital NAME is missing"
    if [ -e "$out" ] && ! { [ -d "$out" ] && [ -z "$(ls -A "$out")" ]; }; then
        fail "$out is not empty and nothing is overwritten; give another --out, --renew-server or --add-hospital"
    fi
    mkdir -p "$(dirname "$out")"
    work=$(mktemp -d "$(dirname "$out")/.make-secrets.XXXXXX")
    local name
    make_authority "$work"
    new_key "$work/server.key"
    sign_server "$work" "$work/server.key" "$work/server.crt" "$(alt_names "${hosts[@]}")"
    for name in "${hospitals[@]}"; do
        make_hospital "$work" "$name"
    done
    write_registry "$work/registry.json" "$work"/*.pub
    [ -z "$owner" ] || quiet find "$work" -type f ! -name ca.key -exec chown "$owner:$owner" {} +
    # One rename: the folder is there with all that belongs into it, or not at all
    mv -T "$work" "$out"
}

renew() {
    [ ${#hospitals[@]} -eq 0 ] || fail "--renew-server takes no --hospital; use --add-hospital"
    need_authority "sign the server's certificate"
    [ -r "$out/server.key" ] && [ -r "$out/server.crt" ] ||
        fail "$out: server.crt or server.key is missing or not readable"
    work=$(mktemp -d "$out/.make-secrets.XXXXXX")
    local names
    names=$(sans_of "$out/server.crt")
    [ ${#hosts[@]} -eq 0 ] || names=$(alt_names "${hosts[@]}")
    sign_server "$out" "$out/server.key" "$work/server.crt" "$names"
    quiet chown --reference="$out/server.crt" "$work/server.crt"
    mv "$work/server.crt" "$out/server.crt"
}

add() {
    [ ${#hospitals[@]} -eq 0 ] || fail "--add-hospital takes no --hospital; repeat --add-hospital"
    [ -r "$out/ca.crt" ] || fail "$out holds no ca.crt: not a folder that this script made"
    local name
    for name in "${added[@]}"; do
        [ ! -e "$out/$name.key" ] && [ ! -e "$out/$name.pub" ] ||
            fail "$out/$name.key or .pub exists and is not overwritten; remove both to give $name a new key"
    done
    work=$(mktemp -d "$out/.make-secrets.XXXXXX")
    for name in "${added[@]}"; do
        make_hospital "$work" "$name"
    done
    write_registry "$work/registry.json" "$out"/*.pub "$work"/*.pub
    quiet chown --reference="$out/ca.crt" "$work"/*
    mv -n "$work"/*.key "$work"/*.pub "$out"
    mv "$work/registry.json" "$out"
}

work=""
trap '[ -z "$work" ] || rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP
parse "$@"
out=${out%/}
for tool in openssl ssh-keygen; do
    command -v "$tool" >/dev/null || fail "$tool is not installed (Debian: openssl, openssh-client)"
done
"$action"
[ "$action" = show ] || show
