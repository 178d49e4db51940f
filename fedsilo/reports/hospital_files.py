"""Files that a hospital puts next to a run for its own report: the audit log and the site file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.client_app.site.policy import SiteFile, parsed_site_file
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.text_files import file_fault

_KEYS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("time", "site", "run", "kind", "outcome", "why"), str),
    **dict.fromkeys(("bytes-in", "bytes-out"), int),
    "round": (int, str),
    "records": dict,
}


@dataclass(frozen=True)
class AuditLog:
    """An audit log: its complete lines, and how many are cut short."""

    path: Path
    lines: Sequence[Mapping[str, Any]]
    torn: int

    def of_run(self, run_name: str) -> list[Mapping[str, Any]]:
        """Return the lines of a run.

        Raises:
            DataError: there is none; names the runs that the log has.
        """
        found = [line for line in self.lines if line["run"] == run_name]
        if not found:
            known = ", ".join(dict.fromkeys(str(line["run"]) for line in self.lines)) or "none"
            raise DataError(
                f"{self.path} has no message of run '{run_name}', only of: {known}; name the log "
                "of a hospital that took part"
            )
        return found


def read_audit_log(path: Path) -> AuditLog:
    """Read a hospital's audit log.

    Raises:
        DataError: it cannot be read, or a complete line does not belong to an audit log.
    """
    lines, torn = [], 0
    for number, text in enumerate(_text(path, "audit log").splitlines(), 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # lists within lists
            torn += 1
            continue
        known = isinstance(line, dict) and all(
            isinstance(line.get(key), kind) for key, kind in _KEYS.items()
        )
        if not known or not all(isinstance(count, int) for count in line["records"].values()):
            raise DataError(
                f"{path}, line {number} is not a line of an audit log: name another file"
            )
        lines.append(line)
    if not lines:
        raise DataError(f"{path} has no line of an audit log: name another file")
    return AuditLog(path, lines, torn)


def read_own_site_file(path: Path) -> SiteFile:
    """Read a hospital's site file.

    Raises:
        DataError: it cannot be read or used.
    """
    try:
        return parsed_site_file(_text(path, "site file"))
    except SettingError as error:
        raise DataError(f"the site file {path} cannot be used: {error}") from None


def _text(path: Path, what: str) -> str:
    if fault := file_fault(path):  # a pipe would be waited for
        raise DataError(f"the {what} {path} cannot be read: it {fault}")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"the {what} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"the {what} {path} cannot be read: it is not UTF-8 text") from None
