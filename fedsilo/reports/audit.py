"""``fedsilo audit``: what left a hospital, from its own audit log, and whether the log is whole."""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

from rich.table import Table

from fedsilo.client_app.site.log_chain import Link, find_breaks, link_of
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.one_line import format_count, join_names, one_line
from fedsilo.reports.hospital_files import read_audit_log
from fedsilo.server_app.records.progress import bytes_text

_COLUMNS = ("time", "site", "run", "round", "kind", "phase", "outcome", "records", "bytes-out")
_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
_LIKE_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Choice:
    """The lines that an auditor asks for.

    Attributes:
        run: the name of a run; empty for all runs.
        since: the earliest time.
        until: the latest time, inclusive.
    """

    run: str = ""
    since: datetime = _FIRST
    until: datetime = _LAST

    def takes(self, line: Mapping[str, Any]) -> bool:
        """Tell whether a line is about the chosen run and its time is in the chosen range."""
        if self.run and line["run"] != self.run:
            return False
        return self.since <= _time_of(line) <= self.until


@dataclass(frozen=True)
class Audit:
    """The chosen lines of an audit log, and the state of the log's chain.

    Attributes:
        chosen: the chosen lines, in the log's order.
        count: the number of lines in the log.
        torn: the number of lines that a power cut tore; their answers never left.
        unchained: the number of lines of an earlier version, which have no check value.
        first: the number of the first line in the chain; None without a chain.
        last: the last line in the chain; None without a chain.
        has_head: whether the number of the log's last line is kept beside the log.
        breaks: a sentence for each place at which the chain is broken.
    """

    chosen: Sequence[Mapping[str, Any]]
    count: int
    torn: int
    unchained: int
    first: int | None
    last: Link | None
    has_head: bool
    breaks: Sequence[str]

    def lines(self) -> Iterator[str | Table]:
        """Describe for a terminal which data left the hospital, and whether its log is whole.

        Yields:
            A table of the chosen messages, if any. The next item is a line with the number of
            chosen messages, the number with each outcome (such as "answered"), and the bytes that
            left. The last items tell whether the log was changed.
        """
        if self.chosen:
            yield self._table()
        sent = sum(line["bytes-out"] for line in self.chosen)
        outcomes = Counter(str(line["outcome"]) for line in self.chosen)
        parts = [f"{number} {outcome}" for outcome, number in sorted(outcomes.items())]
        yield (
            f"{len(self.chosen)} of {format_count(self.count, 'message')}: "
            f"{', '.join(parts) or 'none chosen'}; {bytes_text(sent)} left"
        )
        yield from self._chain()

    def _table(self) -> Table:
        table = Table("time (UTC)", "run", "round", "message", "outcome", "what left", "bytes")
        for line in self.chosen:
            message = line["kind"]
            if line.get("phase", "") not in ("", line["kind"]):
                message += f", phase {line['phase']}"
            time_text = _time_of(line).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
            cells = [time_text, line["run"], line["round"], message, line["outcome"]]
            cells += [what_left(line) or "nothing", f"{line['bytes-out']:,}"]
            table.add_row(*[one_line(cell, 120) for cell in cells])
        return table

    def _chain(self) -> Iterator[str]:
        """Describe whether the log was changed, according to its chain of check values.

        Each line has a check value, computed from the line and the check value before it.

        Yields:
            A sentence for each break of the chain. Further sentences follow if they apply:

            - A power cut left incomplete lines.
            - Lines of an earlier version have no check value.
            - The log does not begin with its first line.
            - The ``.head`` file is missing, which would show whether lines were removed from the
              end.
            - The chain is whole. This sentence gives the last check value, for a later comparison.
        """
        for text in self.breaks:
            yield f"CHAIN BROKEN: {text}"
        if self.torn:
            yield f"{format_count(self.torn, 'line')} torn by a power cut; no answer left for them"
        if self.unchained:
            lines = format_count(self.unchained, "line")
            yield f"{lines} of an earlier version of fedsilo without check values: not checked"
        if self.first is not None and self.first > 1:
            yield f"the log begins with line {self.first}: give the log before it as well"
        if not self.has_head and self.last:
            yield (
                "the file .head beside the log is missing: whether lines were removed from the end "
                "cannot be told"
            )
        if self.last and not self.breaks:
            yield (
                f"chain: lines {self.first} to {self.last.number} are whole; check value of the "
                f"last line: {self.last.check[:16]} (keep it on another machine, and compare later)"
            )

    def document(self) -> dict[str, Any]:
        """Return the audit as a dictionary for JSON.

        ``lines`` holds the chosen messages. ``lines-in-log``, ``torn`` and ``without-check-value``
        count complete lines, incomplete lines, and lines without a check value. ``first-number``,
        ``last-number`` and ``last-check`` are the ends of the chain of check values, and None
        without a chain. ``breaks`` holds a sentence for each break of the chain.
        """
        return {
            "lines": [dict(line) for line in self.chosen],
            "lines-in-log": self.count,
            "torn": self.torn,
            "without-check-value": self.unchained,
            "first-number": self.first,
            "last-number": self.last.number if self.last else None,
            "last-check": self.last.check if self.last else None,
            "breaks": list(self.breaks),
        }

    def csv(self) -> str:
        """Format the chosen messages as CSV, with headings and a row for each message.

        An apostrophe is put before a cell that a spreadsheet would run as a formula.
        """
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(_COLUMNS)
        for line in self.chosen:
            cells = {**line, "records": what_left(line)}
            table.writerow([_safe_cell(cells.get(key, "")) for key in _COLUMNS])
        return text.getvalue()


def what_left(line: Mapping[str, Any]) -> str:
    """Describe what left with a message: the entries of each record, such as "4 arrays"."""
    entries = Counter[str]()
    for pattern, count in line["records"].items():
        entries[pattern.partition("/")[0]] += count
    return join_names([f"{count} {record}" for record, count in sorted(entries.items())])


def _safe_cell(value: object) -> str:
    text = str(value)
    if text.startswith(_LIKE_FORMULAS) and not isinstance(value, int):
        return f"'{text}"
    return text


def _time_of(line: Mapping[str, Any]) -> datetime:
    """Parse the key ``time`` of a line of the audit log as a time with a time zone.

    Raises:
        DataError: the time is not in ISO 8601 format, or has no time zone.
    """
    try:
        found = datetime.fromisoformat(line["time"])
    except ValueError:
        found = datetime.min
    if found.tzinfo is None:
        raise DataError(
            f"line {line.get('number', '?')} of the audit log has the time "
            f"'{one_line(line['time'], 40)}', which was not written by fedsilo"
        )
    return found


def parse_moment(text: str, option: str, end_of_day: bool) -> datetime:
    """Parse a command-line option's date or time, such as 2026-03-03 or 2026-03-03T14:00.

    A date is in UTC. A time without a time zone is in UTC too.

    Args:
        text: the date or time, in ISO 8601 format.
        option: the option's name, for the error.
        end_of_day: whether a date without a time means the last moment of the day; otherwise it
            means the first.

    Raises:
        SettingError: the text is not a date or a time.
    """
    try:
        if len(text) == len("2026-03-03"):
            hour = time.max if end_of_day else time.min
            return datetime.combine(date.fromisoformat(text), hour, UTC)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise SettingError(
            f"{option} must be a date or a time, such as 2026-03-03 or 2026-03-03T14:00, but is "
            f"'{one_line(text, 40)}'"
        ) from None
    if moment.tzinfo is None:
        return moment.replace(tzinfo=UTC)
    return moment


def audit_logs(paths: Sequence[Path], choice: Choice) -> Audit:
    """Read a hospital's audit logs, check them for changes, and keep the wanted lines.

    Each line has a check value, computed from the line and the check value before it. These values
    form a chain over all files. A broken chain is no error: ``breaks`` of the result describes each
    break.

    Args:
        paths: the log files, oldest first. Each continues the file before it.
        choice: the run and the times of the lines to keep.

    Raises:
        DataError: a log cannot be read, or a file is not an audit log.
    """
    lines: list[Mapping[str, Any]] = []
    torn = 0
    head: Link | None = None
    for path in paths:
        log = read_audit_log(path)
        lines += log.lines
        torn += log.torn
        head = log.head
    links = [link for link in map(link_of, lines) if link is not None]
    return Audit(
        chosen=[line for line in lines if choice.takes(line)],
        count=len(lines),
        torn=torn,
        unchained=len(lines) - len(links),
        first=links[0].number if links else None,
        last=links[-1] if links else None,
        has_head=head is not None,
        breaks=list(find_breaks(lines, head)),
    )
