"""Reads the files that a hospital adds to its own report: the audit log and the site file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.client_app.site.log_chain import Link, read_head
from fedsilo.client_app.site.policy import SiteFile, parse_site_file
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.text_files import file_fault

# Key of a log's line -> the types of its value
_KEYS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("time", "site", "run", "kind", "outcome", "why"), str),
    **dict.fromkeys(("bytes-in", "bytes-out"), int),
    "round": (int, str),
    "records": dict,
}


@dataclass(frozen=True)
class AuditLog:
    """The content of an audit log."""

    path: Path
    lines: Sequence[Mapping[str, Any]]  # the complete lines
    torn: int  # the number of lines that are cut short
    head: Link | None  # the place of the last line as it is kept beside the log

    def of_run(self, run_name: str) -> list[Mapping[str, Any]]:
        """Select the lines of the log that are about the run with this name.

        Raises:
            DataError: no line is about this run. The message names the runs in the log.
        """
        # One log has the messages of all runs that the hospital took part in
        found = [line for line in self.lines if line["run"] == run_name]
        if not found:
            runs = dict.fromkeys(str(line["run"]) for line in self.lines)
            raise DataError(
                f"{self.path} has no message of run '{run_name}', only of: "
                f"{', '.join(runs) or 'none'}; name the log of a hospital that took part"
            )
        return found


def read_audit_log(path: Path) -> AuditLog:
    """Read a hospital's audit log, and the number and check value of its last line.

    A file beside the log, the head, keeps that number and check value. This function does not
    compare the head with the log. Lines that are not valid JSON are only counted, because they are
    usually cut short.

    Raises:
        DataError: the log or its head cannot be read, a line is JSON but not from an audit log, or
            no line is valid.
    """
    lines, torn = [], 0
    for number, text in enumerate(_text(path, "audit log").splitlines(), 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            torn += 1  # a line that is cut short, or nested too deeply
            continue
        if not _is_log_line(line):
            raise DataError(
                f"{path}, line {number} is not a line of an audit log: name another file"
            )
        lines.append(line)
    if not lines:
        raise DataError(f"{path} has no line of an audit log: name another file")
    try:
        head = read_head(path)
    except OSError as error:
        raise DataError(
            f"the last line's number beside {path} cannot be read: {error.strerror}; run the "
            "command as the owner of the log"
        ) from None
    return AuditLog(path, lines, torn, head)


def _is_log_line(line: Any) -> bool:
    """Tell whether a parsed line of JSON can be a line of a hospital's audit log.

    It must be an object that has all keys of such lines, such as ``time`` and ``bytes-out``, with
    values of the right types. The key ``records`` maps each kind of record to its number of
    entries, which must be a whole number.
    """
    if not isinstance(line, dict):
        return False
    for key, kind in _KEYS.items():
        # A missing key gives None, which is of no type in the table
        if not isinstance(line.get(key), kind):
            return False
    return all(isinstance(count, int) for count in line["records"].values())


def read_own_site_file(path: Path) -> SiteFile:
    """Read a site file, in which a hospital sets its rules.

    Raises:
        DataError: the file cannot be read, or its content is not a valid site file.
    """
    try:
        return parse_site_file(_text(path, "site file"))
    except SettingError as error:
        raise DataError(f"the site file {path} cannot be used: {error}") from None


def _text(path: Path, what: str) -> str:
    """Read a file as UTF-8 text. ``what`` describes the file in errors.

    Raises:
        DataError: the file is missing, is not a regular file, or cannot be read as UTF-8.
    """
    fault = file_fault(path)  # reading a pipe would never end
    if fault:
        raise DataError(f"the {what} {path} cannot be read: it {fault}")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"the {what} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"the {what} {path} cannot be read: it is not UTF-8 text") from None
