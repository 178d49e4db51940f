"""The passphrase of a backup, from a file or from the terminal."""

import getpass
import os
import sys
from pathlib import Path

from fedsilo.core.errors import SettingError
from fedsilo.core.files.atomic_files import open_regular

_SHORTEST = 12  # characters


def read_passphrase(file: Path | None, *, is_new: bool) -> str:
    """Return the passphrase: the first line of ``file``, or what the user types.

    Args:
        file: a file that only its owner may read; None to ask at the terminal.
        is_new: whether the passphrase is for a new backup, so that it is asked for twice.

    Raises:
        SettingError: the file may be read by other users, nobody can be asked, the two answers
            differ, or the passphrase is shorter than 12 characters.
        OSError: the file cannot be read.
    """
    if file is not None:
        passphrase, fault = _read_file(file.expanduser())
    elif sys.stdin.isatty():
        passphrase, fault = _ask(is_new)
    else:
        passphrase, fault = "", "nobody can be asked for the passphrase: give --passphrase-file"
    if not fault and len(passphrase) < _SHORTEST:
        fault = f"the passphrase has fewer than {_SHORTEST} characters: choose a longer one"
    if fault:
        raise SettingError(fault)
    return passphrase


def _read_file(file: Path) -> tuple[str, str]:
    """Read the passphrase, the first line of a file.

    Returns:
        The passphrase and an empty string. If other users may read the file, an empty string and
        the reason of the refusal.
    """
    with os.fdopen(open_regular(file, os.O_RDONLY), encoding="utf-8", errors="replace") as opened:
        mode = os.fstat(opened.fileno()).st_mode & 0o777
        if mode & 0o077:
            return "", f"{file} has mode {mode:o}, so other users may read it: chmod 600 the file"
        return opened.readline().rstrip("\r\n"), ""


def _ask(is_new: bool) -> tuple[str, str]:
    """Ask for the passphrase at the terminal; for a new backup, ask twice.

    Returns:
        The passphrase and an empty string. If the two answers differ, an empty string and the
        reason of the refusal.
    """
    passphrase = getpass.getpass("Passphrase of the backup: ")
    if is_new and getpass.getpass("The same again: ") != passphrase:
        return "", "the two passphrases differ: repeat the command"
    return passphrase, ""
