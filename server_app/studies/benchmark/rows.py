"""The CSV file of a benchmark: a row per run, and one per method and experiment that was not run.

Each row is on the disk, with all before it, before the next run begins.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import SettingError


@dataclass(frozen=True)
class Row:
    """A run, or why there is none.

    Attributes:
        experiment: of the simulation file.
        method: of the table of methods.
        seed: of the run; None where nothing was run.
        rate: the learning rate.
        own: the method's own setting as ``key=value``, or an empty string.
        metric: what decides.
        validation: its mean over sites of the validation part; None if the run failed.
        loss: mean validation loss.
        test: the metric's mean over sites of the test part.
        accuracy: the same of accuracy.
        up: bytes that left the sites.
        down: bytes that the server sent.
        seconds: what the run took.
        run: a digest of settings and data.
        note: why it was not run, or failed.
    """

    experiment: str
    method: str
    seed: int | None = None
    rate: float | None = None
    own: str = ""
    metric: str = ""
    validation: float | None = None
    loss: float | None = None
    test: float | None = None
    accuracy: float | None = None
    up: int | None = None
    down: int | None = None
    seconds: float | None = None
    run: str = ""
    note: str = ""

    @property
    def cell(self) -> tuple[str, str]:
        """Experiment and method."""
        return self.experiment, self.method

    @property
    def point(self) -> tuple[float | None, str]:
        """What was tried."""
        return self.rate, self.own


_COLUMNS = [entry.name for entry in fields(Row)]
_KINDS = {entry.name: entry.type for entry in fields(Row)}
_MEASURED = ("validation", "loss", "test", "accuracy", "up", "down", "seconds")


@dataclass
class Rows:
    """All rows of a file; ``add`` puts one on the disk."""

    path: Path
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Rows":
        """Read what is there; a last line that is cut short is left out, and run again.

        Raises:
            SettingError: the file is no table of a benchmark, or a line in it is damaged.
        """
        if not path.is_file():
            return cls(path)
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        first, *lines = csv.reader(io.StringIO(whole)) if whole else [[]]
        if first != _COLUMNS:
            raise SettingError(f"{path} is no table of 'fedsilo benchmark': name another --csv")
        return cls(path, [_parsed(cells, path, 2 + at) for at, cells in enumerate(lines)])

    def found(self, row: Row) -> Row | None:
        """Return the run of the row's seed and point, if there is one of the same digest.

        Raises:
            SettingError: there is one of other settings or data.
        """
        same = (row.cell, row.seed, row.point)
        for known in self.rows:
            if (known.cell, known.seed, known.point) == same:
                if known.run != row.run:
                    raise SettingError(
                        f"{self.path} has a run of '{row.method}' on '{row.experiment}' with other "
                        "settings or data: name another --csv, or delete its lines"
                    )
                return known
        return None

    def add(self, row: Row) -> Row:
        """Append a row, for good."""
        self.rows.append(row)
        self.write()
        return row

    def not_run(self, row: Row) -> None:
        """Put a row that says why a method was not run in place of an earlier one."""
        if row not in self.rows:
            self.rows = [known for known in self.rows if known.cell != row.cell or known.run]
            self.add(row)

    def write(self) -> None:
        """Write the file."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows([_text(getattr(row, name)) for name in _COLUMNS] for row in self.rows)
        write_atomically(self.path, text.getvalue())


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    return "" if value is None else str(value)


def _parsed(cells: Sequence[str], path: Path, line: int) -> Row:
    """Return a line's row; one that ran has all its figures."""
    try:
        named = dict(zip(_COLUMNS, cells, strict=True))
        row = Row(**{name: _value(text, _KINDS[name]) for name, text in named.items()})
        if not row.note and None in [getattr(row, name) for name in _MEASURED]:
            raise ValueError
    except ValueError:
        raise SettingError(
            f"{path}, line {line} is damaged: delete it, and it is run again"
        ) from None
    return row


def _value(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if not text:
        return None
    return float(text) if kind == float | None else int(text)


def rounded(row: Row) -> Row:
    """Return the row as the file has it."""
    return replace(row, **{n: _value(_text(getattr(row, n)), _KINDS[n]) for n in _COLUMNS})
