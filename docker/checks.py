"""What both entry points check before Flower starts: secrets and folders, one clear line each."""

from __future__ import annotations

import os
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

HEALTH_ADDRESS = "127.0.0.1:8081"
_CERTIFICATE, _PRIVATE_KEY = "BEGIN CERTIFICATE", "PRIVATE KEY"


class Refused(Exception):
    """A container that cannot start as it was set up; the message is one line."""


def secret(path: Path, marker: str, private: bool) -> Path:
    """Return the path of a secret that is there, readable and of the right kind.

    Raises:
        Refused: it is missing, empty, not readable, no such kind, or private and open to others.
    """
    try:
        text = path.read_text(encoding="ascii", errors="replace")
        mode = path.stat().st_mode & 0o777
    except (FileNotFoundError, IsADirectoryError) as error:
        raise Refused(f"secret {path} is missing: mount the file there") from error
    except PermissionError as error:
        told = f"secret {path} is not readable by user {os.getuid()}: chown it to that user"
        raise Refused(told) from error
    if marker not in text:
        raise Refused(f"secret {path} holds no '{marker}': another file was mounted there")
    if private and mode & 0o077:
        told = f"secret {path} has mode {mode:o}, others may read it: chmod 600 it on the host"
        raise Refused(told)
    return path


def certificate(path: Path) -> Path:
    """Return the path of a certificate that is readable and holds today; Refused otherwise."""
    from cryptography.x509 import load_pem_x509_certificate

    secret(path, _CERTIFICATE, private=False)
    try:
        found = load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise Refused(f"certificate {path} cannot be read: make it anew") from error
    begin, end, today = found.not_valid_before_utc, found.not_valid_after_utc, datetime.now(UTC)
    if today > end:
        told = "renew it (make-secrets.sh --renew-server)"
        raise Refused(f"certificate {path} ended on {end:%Y-%m-%d %H:%M} UTC: {told}")
    if today < begin:
        told = "set this machine's clock"
        raise Refused(f"certificate {path} begins on {begin:%Y-%m-%d %H:%M} UTC: {told}")
    return path


def matching_key(path: Path, certificate_path: Path) -> Path:
    """Return the path of the private key of a certificate; Refused if it is another's."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificate

    secret(path, _PRIVATE_KEY, private=True)
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (TypeError, ValueError) as error:
        raise Refused(f"secret {path} is no unencrypted PEM key") from error
    if key.public_key() != load_pem_x509_certificate(certificate_path.read_bytes()).public_key():
        raise Refused(f"secret {path} is not the key of {certificate_path}: mount the pair")
    return path


def handshake(address: str, authority: Path) -> None:
    """Refuse a server whose certificate does not hold: Flower itself would try again for ever.

    A server that does not answer yet is Flower's to wait for.

    Args:
        address: of the Fleet API, host:port.
        authority: the certificate that must have signed the server's.

    Raises:
        Refused: it ended, it is another host's or another authority's, or no TLS is spoken there.
    """
    host, port = address.rsplit(":", 1)
    host = host.strip("[]")
    context = ssl.create_default_context(cafile=str(authority))
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return
    except ssl.SSLCertVerificationError as error:
        told = f"server {address} is not to be trusted with {authority}: {error.verify_message}"
        raise Refused(f"{told}; ask the server's keeper, send nothing") from error
    except ssl.SSLEOFError:
        return  # it is ending, or a proxy waits for it
    except ssl.SSLError as error:
        told = f"server {address} does not speak TLS ({error.reason})"
        raise Refused(f"{told}: is this the port of its Fleet API?") from error
    except OSError as error:
        print(f"server {address} does not answer yet ({error}): waiting", file=sys.stderr)


def writable_folder(path: Path, what: str) -> Path:
    """Return a folder that this user can write into; Refused otherwise."""
    if not path.is_dir():
        raise Refused(f"{what} {path} is missing: mount a volume there")
    if not os.access(path, os.W_OK | os.X_OK):
        raise Refused(f"{what} {path} is not writable by user {os.getuid()}: chown the volume")
    return path


def data_folder(path: Path) -> Path:
    """Return a folder of data that is there, readable and not empty; Refused otherwise."""
    if not path.is_dir():
        raise Refused(f"data directory {path} is missing: mount the data there, read-only")
    try:
        first = next(path.iterdir(), None)
    except PermissionError as error:
        told = f"data directory {path} is not readable by user {os.getuid()}"
        raise Refused(told) from error
    if first is None:
        raise Refused(f"data directory {path} is empty: mount the data there, read-only")
    return path


def site_file(path: Path) -> bool:
    """Return whether the hospital has a site file: compose mounts /dev/null where it has none.

    Raises:
        Refused: something else is there, and going on would drop the hospital's own word.
    """
    if not path.exists() or path.is_char_device():
        return False
    if not path.is_file():  # the engine makes a folder of a path that is not on the host
        raise Refused(f"site file {path} is no file: what SITE_FILE_n names is not on the host")
    if not os.access(path, os.R_OK):
        raise Refused(f"site file {path} is not readable by user {os.getuid()}: chown or chmod it")
    return True


def start(name: str, command: Callable[[], Sequence[str]], show: bool) -> int:
    """Become the command, or print it if ``show``; 2 and a line if it is refused."""
    try:
        arguments = list(command())
    except Refused as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    print(" ".join(_quoted(argument) for argument in arguments), flush=True)
    if not show:
        os.execvp(arguments[0], arguments)  # Flower itself is the container's process 1
    return 0


def _quoted(argument: str) -> str:
    return f"'{argument}'" if " " in argument or '"' in argument else argument
