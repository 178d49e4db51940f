"""The chain of an audit log: removed and altered lines are found.

Each line has a number and a check value, a SHA-256 over the line and the check value of the line
before. So a line cannot be altered, removed or inserted without a mismatch at the next line. The
number and the check value of the last line are also kept in a file next to the log, its head, which
shows whether lines were removed from the end. If a log is moved away, the next log continues the
chain. Whoever can write both files can write a new chain: keep a check value on another machine.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.core.files.atomic_files import read_regular, write_atomically

NUMBER, CHECK = "number", "check"


@dataclass(frozen=True)
class Link:
    """The place of a line in the chain.

    Attributes:
        number: the line's number, from 1; 0 before the first line.
        check: the line's check value, 64 hexadecimal digits; empty before the first line.
    """

    number: int
    check: str


START = Link(0, "")


def add_link(line: Mapping[str, Any], before: Link) -> dict[str, Any]:
    """Return a copy of the audit log's next line, with its number and its check value.

    The number is one above that of the previous line. The check value is a SHA-256 over the
    numbered line and the previous line's check value. So a later check finds altered or missing
    lines.

    Args:
        line: the line's keys and values.
        before: the number and the check value of the previous line; ``START`` for the first line.
    """
    numbered = {**line, NUMBER: before.number + 1}
    return {**numbered, CHECK: _check_value(numbered, before.check)}


def link_of(line: Mapping[str, Any]) -> Link | None:
    """Return the number and the check value that a line of the audit log has.

    Only their types are checked. The result is None if one of them is missing or has the wrong
    type. Lines from an earlier version of fedsilo have neither.
    """
    number, check = line.get(NUMBER), line.get(CHECK)
    if isinstance(number, int) and isinstance(check, str):
        return Link(number, check)
    return None


def _check_value(line: Mapping[str, Any], before: str) -> str:
    """Compute a line's check value: SHA-256 of the check value before and of the line as JSON."""
    text = json.dumps(line, sort_keys=True)
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()


def head_file(log: Path) -> Path:
    """Return the path of the file that stores the place of the log's last line."""
    return log.with_name(f"{log.name}.head")


def read_head(log: Path) -> Link | None:
    """Read the number and the check value of a log's last line from the log's head.

    The head is a JSON file next to the log. The two values are not checked against the log.

    Returns:
        The two values. None if the head does not exist or is not a JSON object, or if a value is
        missing or has the wrong type.

    Raises:
        OSError: the head exists but cannot be read, or is not a regular file.
    """
    try:
        content = json.loads(read_regular(head_file(log)))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return link_of(content) if isinstance(content, dict) else None


def write_head(log: Path, last: Link) -> None:
    """Write the number and the check value of the log's last line to the log's head.

    The head is a JSON file next to the log. An earlier head is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps({NUMBER: last.number, CHECK: last.check})
    # After a power cut the head may be one line older than the log, which is not a fault
    write_atomically(head_file(log), text + "\n", 0o600, lasting=False)


def find_breaks(lines: Sequence[Mapping[str, Any]], head: Link | None) -> Iterator[str]:
    """Yield a sentence for each place where an audit log's chain of lines is broken.

    In an intact chain, each number is one above the number before it. Each check value is the
    SHA-256 over its line and the check value before it. If the first numbered line has a number
    above 1, it may continue another log that is not given, so its check value is not verified.
    Lines without a number, from an earlier version, may only stand before the first numbered line.

    The head's check value must be in one of the lines, not always in the last one. After a power
    failure the head may be one line older than the log, which is no fault.

    Args:
        lines: the lines of one log, or of consecutive logs, in order.
        head: the number and the check value of the last line, from the file next to the log. If it
            is None, lines removed from the end are not found.
    """
    last: Link | None = None
    for line in lines:
        link = link_of(line)
        if link is None:
            if last is not None:
                yield f"after line {last.number} comes a line without a number: it was inserted"
            continue
        if last is not None and link.number != last.number + 1:
            yield _gap(last.number, link.number)
        # Before the first line only line 1 can be checked; a later one continues another log
        elif (last is not None or link.number == 1) and not _follows(line, last or START):
            yield f"line {link.number}, or its check value, was altered"
        last = link
    if head is None:
        return
    if last is None or head.number > last.number:
        yield _gap(0 if last is None else last.number, head.number + 1)
    elif head.check not in {line.get(CHECK) for line in lines}:
        yield f"line {head.number} is not the one that was kept as the log's last line"


def _follows(line: Mapping[str, Any], before: Link) -> bool:
    """Tell whether the line's check value fits its content and the check value before it."""
    content = {key: value for key, value in line.items() if key != CHECK}
    return bool(line[CHECK] == _check_value(content, before.check))


def _gap(last: int, following: int) -> str:
    """Describe in one sentence that line numbers of the log are missing or in the wrong order.

    Args:
        last: the number of the line before the gap; 0 at the start of the log.
        following: the number of the line after the gap. If it is not above ``last``, the order is
            wrong.
    """
    first, end = last + 1, following - 1
    if end < first:
        return f"line {following} comes after line {last}: lines were put in another order"
    if first == end:
        return f"line {first} is missing"
    return f"lines {first} to {end} are missing"
