"""Certificates, keys and folders as they must be; the containers' entry points look by these too.

Each function returns what is as it must be, and refuses what is not by one line with its mend. No
heavy import: a container starts by it.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedsilo.server_app.doctor.findings import Refused

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

CERTIFICATE, PRIVATE_KEY, OPENSSH_KEY = (
    "BEGIN CERTIFICATE",
    "PRIVATE KEY",
    "BEGIN OPENSSH PRIVATE KEY",
)
_RENEW = "renew it (make-secrets.sh --renew-server)"
_CLOCK = "set this machine's clock"


def secret(path: Path, marker: str, private: bool) -> Path:
    """Return the path of a secret that is there, readable and of the right kind.

    Raises:
        Refused: it is missing, empty, not readable, no such kind, or private and open to others.
    """
    try:
        text = path.read_text(encoding="ascii", errors="replace")
        mode = path.stat().st_mode & 0o777
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise Refused(f"secret {path} is missing", "bring the file there, or mount it") from error
    except PermissionError as error:
        fault = f"secret {path} is not readable by user {os.getuid()}"
        raise Refused(fault, "chown it to that user") from error
    if marker not in text:
        raise Refused(f"secret {path} holds no '{marker}'", "another file was mounted there")
    if private and mode & 0o077:
        fault = f"secret {path} has mode {mode:o}, others may read it"
        raise Refused(fault, "chmod 600 it, on the host where it is mounted")
    return path


def read_certificate(path: Path) -> Certificate:
    """Return a certificate; Refused if it is missing or cannot be read."""
    from cryptography.x509 import load_pem_x509_certificate

    secret(path, CERTIFICATE, private=False)
    try:
        return load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise Refused(f"certificate {path} cannot be read", "make it anew") from error


def certificate(path: Path, now: datetime | None = None) -> Path:
    """Return the path of a certificate that is readable and holds; Refused otherwise.

    Args:
        path: the file.
        now: when it must hold; None: today.
    """
    found, today = read_certificate(path), now or datetime.now(UTC)
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    if today > end:
        raise Refused(f"certificate {path} ended on {end:%Y-%m-%d %H:%M} UTC", _RENEW)
    if today < begin:
        raise Refused(f"certificate {path} begins on {begin:%Y-%m-%d %H:%M} UTC", _CLOCK)
    return path


def lasting_certificate(path: Path, now: datetime, days: int) -> str:
    """Say until when a certificate holds.

    Raises:
        Refused: it does not hold, or not for so many days more.
    """
    end = read_certificate(certificate(path, now)).not_valid_after_utc
    left = (end - now).days
    if left < days:
        raise Refused(f"certificate {path} ends on {end:%Y-%m-%d}, in {left} days", _RENEW)
    return f"{path} holds until {end:%Y-%m-%d}, {left} days"


def matching_key(path: Path, certificate_path: Path) -> Path:
    """Return the path of the private key of a certificate; Refused if it is another's."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    secret(path, PRIVATE_KEY, private=True)
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (TypeError, ValueError) as error:
        raise Refused(f"secret {path} is no unencrypted PEM key", "mount such a one") from error
    if key.public_key() != read_certificate(certificate_path).public_key():
        raise Refused(f"secret {path} is not the key of {certificate_path}", "mount the pair")
    return path


def signed_by(path: Path, authority: Path) -> None:
    """Refuse a certificate that the authority has not signed: no hospital would trust it."""
    from cryptography.exceptions import InvalidSignature

    try:
        read_certificate(path).verify_directly_issued_by(read_certificate(authority))
    except (ValueError, TypeError, InvalidSignature) as error:
        fault = f"certificate {path} was not signed by {authority}"
        raise Refused(fault, "bring the pair that make-secrets.sh made") from error


def writable_folder(path: Path, what: str) -> Path:
    """Return a folder that this user can write into; Refused otherwise."""
    if not path.is_dir():
        raise Refused(f"{what} {path} is missing", "make the folder, or mount a volume there")
    if not os.access(path, os.W_OK | os.X_OK):
        fault = f"{what} {path} is not writable by user {os.getuid()}"
        raise Refused(fault, "chown the folder, or the volume")
    return path


def data_folder(path: Path) -> Path:
    """Return a folder of data that is there, readable and not empty; Refused otherwise."""
    if not path.is_dir():
        raise Refused(
            f"data directory {path} is missing", "bring the data there, or mount them read-only"
        )
    try:
        first = next(path.iterdir(), None)
    except PermissionError as error:
        fault = f"data directory {path} is not readable by user {os.getuid()}"
        raise Refused(fault, "let that user read it") from error
    if first is None:
        raise Refused(
            f"data directory {path} is empty", "bring the data there, or mount them read-only"
        )
    return path


def site_file(path: Path) -> bool:
    """Return whether the hospital has a site file: compose mounts /dev/null where it has none.

    Raises:
        Refused: something else is there, and going on would drop the hospital's own word.
    """
    if not path.exists() or path.is_char_device():
        return False
    if not path.is_file():  # the engine makes a folder of a path that is not on the host
        raise Refused(
            f"site file {path} is no file", "what SITE_FILE_n names must be a file on the host"
        )
    if not os.access(path, os.R_OK):
        fault = f"site file {path} is not readable by user {os.getuid()}"
        raise Refused(fault, "chown or chmod it")
    return True
