"""The passphrase of a backup, from a file or from the terminal."""

import getpass
import os
import sys
from pathlib import Path

from fedsilo.core.errors import SettingError
from fedsilo.core.files.atomic_files import open_regular

_SHORTEST = 12  # characters


def read_passphrase(file: Path | None, *, is_new: bool) -> str:
    """Read the passphrase of a backup from a file, or ask for it at the terminal.

    Args:
        file: the file, whose first line is the passphrase. Only its owner may have access to it.
            None means to ask at the terminal.
        is_new: whether the passphrase is for a new backup. The terminal then asks for it twice.

    Raises:
        SettingError: the file's mode gives other users any access, there is no terminal, the two
            answers differ, or the passphrase has fewer than 12 characters.
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
    """Read the passphrase from the first line of a file that only its owner may access.

    Returns:
        A tuple of the passphrase, without its line end, and an empty text. If the file's mode gives
        other users any access, the tuple has an empty text and a sentence with the reason and the
        remedy.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    with os.fdopen(open_regular(file, os.O_RDONLY), encoding="utf-8", errors="replace") as opened:
        # The mode of the open file, because another file could get this path after a check
        mode = os.fstat(opened.fileno()).st_mode & 0o777
        if mode & 0o077:
            return "", f"{file} has mode {mode:o}, so other users may read it: chmod 600 the file"
        return opened.readline().rstrip("\r\n"), ""


def _ask(is_new: bool) -> tuple[str, str]:
    """Ask for the passphrase at the terminal, twice for a new backup.

    Returns:
        A tuple of the passphrase and an empty text. If the two answers differ, the tuple has an
        empty text and a sentence with the reason.
    """
    passphrase = getpass.getpass("Passphrase of the backup: ")
    if is_new and getpass.getpass("The same again: ") != passphrase:
        return "", "the two passphrases differ: repeat the command"
    return passphrase, ""
