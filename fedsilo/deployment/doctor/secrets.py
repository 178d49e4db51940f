"""Checks certificates, keys and folders; the containers' entry points use these checks too.

Each function returns its valid argument, or raises ``Refused`` with one line and its fix. There are
no heavy imports, because a container starts with this module.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedsilo.core.files.text_files import file_fault
from fedsilo.deployment.doctor.findings import Refused

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

CERTIFICATE, PRIVATE_KEY = "BEGIN CERTIFICATE", "PRIVATE KEY"
OPENSSH_KEY = "BEGIN OPENSSH PRIVATE KEY"
_RENEW = "renew it ('fedsilo deploy renew server')"
_CLOCK = "set this machine's clock"
_BRING = "copy the data there, or mount them read-only"


def secret(path: Path, marker: str, private: bool) -> Path:
    """Check that a secret is readable and holds the text ``marker``; return its path.

    With ``private``, no other user may read it.
    """
    # Before the file is read, because reading a pipe would wait for ever
    fault = file_fault(path)
    fix = "name a file, or mount one there"
    if not fault:
        fault, fix = _secret_fault(path, marker, private)
    if fault:
        raise Refused(f"secret {path} {fault}", fix)
    return path


def _secret_fault(path: Path, marker: str, private: bool) -> tuple[str, str]:
    """Find what makes a secret's file unusable, and the fix; both are empty for a usable one."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
        mode = path.stat().st_mode & 0o777
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return "is missing", "copy the file there, or mount it"
    except PermissionError:
        return f"is not readable by user {os.getuid()}", "chown it to that user"
    if marker not in text:
        return f"holds no '{marker}'", "another file was mounted there"
    if private and mode & 0o077:
        fault = f"has mode {mode:o}, so other users may read it"
        return fault, "chmod 600 it, on the host where it is mounted"
    return "", ""


def read_certificate(path: Path) -> Certificate:
    """Read a certificate in PEM format; Refused if it is missing or damaged."""
    from cryptography.x509 import load_pem_x509_certificate

    secret(path, CERTIFICATE, private=False)
    try:
        return load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise Refused(f"certificate {path} cannot be read", "make a new one") from error


def certificate(path: Path, now: datetime | None = None) -> Path:
    """Check that a certificate is valid at the time ``now`` (None for the clock's); return it."""
    found, today = read_certificate(path), now or datetime.now(UTC)
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    fault, fix = "", ""
    if today > end:
        fault, fix = f"ended on {end:%Y-%m-%d %H:%M} UTC", _RENEW
    # Nobody makes a certificate for later, so it is the clock that is behind
    elif today < begin:
        fault, fix = f"begins on {begin:%Y-%m-%d %H:%M} UTC", _CLOCK
    if fault:
        raise Refused(f"certificate {path} {fault}", fix)
    return path


def lasting_certificate(path: Path, now: datetime, days: int) -> str:
    """Check that a certificate is valid for at least ``days`` more days; describe its validity."""
    end = read_certificate(certificate(path, now)).not_valid_after_utc
    left = (end - now).days
    if left < days:
        raise Refused(f"certificate {path} ends on {end:%Y-%m-%d}, in {left} days", _RENEW)
    return f"{path} is valid until {end:%Y-%m-%d}, {left} days"


def matching_key(path: Path, certificate_path: Path) -> Path:
    """Check that a private key belongs to a certificate; return the key's path."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    secret(path, PRIVATE_KEY, private=True)
    # The server starts by itself, so nobody is there to type a password
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (TypeError, ValueError) as error:
        raise Refused(f"secret {path} is not an unencrypted PEM key", "mount such a key") from error
    if key.public_key() != read_certificate(certificate_path).public_key():
        raise Refused(
            f"secret {path} is not the key of {certificate_path}",
            "mount a key with its certificate",
        )
    return path


def signed_by(path: Path, authority: Path) -> None:
    """Check that the authority has signed a certificate, because hospitals trust no other."""
    from cryptography.exceptions import InvalidSignature

    try:
        read_certificate(path).verify_directly_issued_by(read_certificate(authority))
    except (ValueError, TypeError, InvalidSignature) as error:
        fault = f"certificate {path} was not signed by {authority}"
        raise Refused(fault, "use the pair of one deployment") from error


def writable_folder(path: Path, what: str) -> Path:
    """Check that this user can write into a folder; return it. ``what`` names it in errors."""
    fault, fix = "", ""
    if not path.is_dir():
        fault, fix = "is missing", "make the folder, or mount a volume there"
    elif not os.access(path, os.W_OK | os.X_OK):
        fault, fix = f"is not writable by user {os.getuid()}", "chown the folder, or the volume"
    if fault:
        raise Refused(f"{what} {path} {fault}", fix)
    return path


def data_folder(path: Path) -> Path:
    """Check that a folder of data is readable and not empty; return it."""
    fault, fix = "", _BRING
    try:
        if not path.is_dir():
            fault = "is missing"
        # Docker makes an empty folder if the one to mount does not exist on the host
        elif next(path.iterdir(), None) is None:
            fault = "is empty"
    except PermissionError:
        fault, fix = f"is not readable by user {os.getuid()}", "let that user read it"
    if fault:
        raise Refused(f"data directory {path} {fault}", fix)
    return path


def site_file(path: Path) -> bool:
    """Tell whether a site file exists; compose mounts /dev/null if the hospital has none.

    Anything else at the path is refused, because continuing would ignore the hospital's rules.
    """
    if not path.exists() or path.is_char_device():
        return False
    fault, fix = "", ""
    if not path.is_file():  # Docker creates a folder if the path is missing on the host
        fault, fix = "is not a file", "let SITE_FILE_n name a file that exists on the host"
    elif not os.access(path, os.R_OK):
        fault, fix = f"is not readable by user {os.getuid()}", "chown or chmod it"
    if fault:
        raise Refused(f"site file {path} {fault}", fix)
    return True
