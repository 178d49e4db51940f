"""The CSV file of a benchmark: a row per run, and one per method and experiment that was not run.

Each row is on the disk, with all before it, before the next run begins.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from pydantic import TypeAdapter

from fedsilo.core.errors import SettingError
from fedsilo.core.files.atomic_files import write_atomically

Point = tuple[float, str]  # learning rate and own setting of a trial


@dataclass(frozen=True)
class Row:
    """A run, or why there is none."""

    experiment: str
    method: str
    seed: int | None = None
    rate: float | None = None
    own: str = ""  # the method's own setting as ``key=value``
    metric: str = ""  # what decides; ``validation`` and ``test`` are its means over sites
    validation: float | None = None
    loss: float | None = None  # mean validation loss
    test: float | None = None
    accuracy: float | None = None
    up: int | None = None  # bytes that left the sites; ``down``: that the server sent
    down: int | None = None
    seconds: float | None = None
    samples: int | None = None  # that all sites trained on in all rounds, with repetitions
    processor: str = ""  # results depend on its vector instructions
    run: str = ""  # a digest of settings and data; empty where nothing was run
    note: str = ""  # why it was not run, or failed; empty where all metrics are there

    @property
    def cell(self) -> tuple[str, str]:
        """Experiment and method."""
        return self.experiment, self.method

    @property
    def point(self) -> Point:
        """The learning rate and the method's own setting; 0 and "" if nothing was run."""
        return self.rate or 0.0, self.own

    @property
    def merit(self) -> tuple[float, float]:
        """What a trial is chosen by: validation metric, equals by loss; a failed one is last."""
        if self.validation is None or self.loss is None:
            return float("-inf"), float("-inf")
        return round(self.validation, 6), -self.loss


def best_point(rows: Sequence[Row], trial_seeds: int) -> Point:
    """Return the point with the best mean validation metric of one method on one experiment.

    Only points that have run with all trial seeds count, and of these the mean over the trial
    seeds. Equal means are decided by the lower mean loss. A point with a failed run is last.

    Args:
        rows: the method's rows on the experiment.
        trial_seeds: the number of trial seeds; they are 0, 1, ....

    Returns:
        The learning rate and the method's own setting as text. If no point has all its trial
        seeds, the rate is 0.
    """
    trials: dict[Point, list[Row]] = {}
    for row in rows:
        if row.run and row.seed is not None and row.seed < trial_seeds:
            trials.setdefault(row.point, []).append(row)
    merits = {
        point: _mean_merit(runs) for point, runs in trials.items() if len(runs) == trial_seeds
    }
    return max(merits, key=lambda point: merits[point], default=(0.0, ""))


def _mean_merit(runs: Sequence[Row]) -> tuple[float, float]:
    """Return the mean validation metric and minus the mean loss, both -inf with a failed run."""
    metrics, losses = zip(*(row.merit for row in runs), strict=True)
    return sum(metrics) / len(runs), sum(losses) / len(runs)


_COLUMNS = [entry.name for entry in fields(Row)]


@dataclass
class Rows:
    """All rows of a file; ``add`` puts one on the disk."""

    path: Path
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Rows":
        """Read what is there; a last line that is cut short is left out, and run again.

        Raises:
            SettingError: the file is not a table of a benchmark, or a line in it is damaged.
        """
        if not path.is_file():
            return cls(path)
        complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
        first, *lines = csv.reader(io.StringIO(complete)) if complete else [[]]
        if first != _COLUMNS:
            raise SettingError(f"{path} is not a table of 'benchmarks.ranking': name another --csv")
        rows = cls(path)
        for number, cells in enumerate(lines, 2):
            try:
                rows.rows.append(_parsed(cells))
            except ValueError:
                raise SettingError(
                    f"{path}, line {number} is damaged: delete it, and it is run again"
                ) from None
        return rows

    def found(self, row: Row) -> Row | None:
        """Return the run of the row's seed and point, if there is one of the same digest.

        Raises:
            SettingError: there is one of other settings or data.
        """
        same = (row.cell, row.seed, row.point)
        known = next((one for one in self.rows if (one.cell, one.seed, one.point) == same), None)
        if known and known.run != row.run:
            raise SettingError(
                f"{self.path} has a run of '{row.method}' on '{row.experiment}' with other "
                "settings or data: name another --csv, or delete its lines"
            )
        return known

    def add(self, row: Row) -> Row:
        """Append a row, for good; in place of one that says why nothing was run."""
        if row in self.rows:
            return row
        self.rows = [known for known in self.rows if known.cell != row.cell or known.run]
        self.rows.append(row)
        text = io.StringIO()
        writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, self.rows))
        write_atomically(self.path, text.getvalue())
        return row


def _parsed(cells: list[str]) -> Row:
    """Return a line's row, or raise a ValueError; one without a note has all its metrics."""
    named = {name: text for name, text in zip(_COLUMNS, cells, strict=True) if text}
    row = TypeAdapter(Row).validate_python(named)
    if not row.note and None in vars(row).values():
        raise ValueError
    return row
