"""The table that ``inversion.py`` makes: a line per cell, its figures over the seeds, as CSV."""

from __future__ import annotations

import csv
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """One line of the table, before its figures."""

    network: str
    weights: str  # from the seed, trained, or the attack's
    training: str  # one step over all samples, or an epoch of batches
    samples: int
    attack: str
    bounds: str = "none"
    messages: int = 1


@dataclass
class Record:
    """Figures by cell and metric, one a seed."""

    csv: Path | None
    figures: dict[tuple[Cell, str], list[float]] = field(default_factory=dict)

    def add(self, cell: Cell, scores: dict[str, float]) -> None:
        """Take and print the figures of one seed."""
        for metric, value in scores.items():
            self.figures.setdefault((cell, metric), []).append(value)
        told = ", ".join(f"{metric} {value:.4g}" for metric, value in scores.items())
        print(*asdict(cell).values(), told, sep=" | ", flush=True)

    def write(self) -> None:
        """Write mean and standard deviation over the seeds as CSV."""
        if self.csv is None:
            return
        with self.csv.open("w", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow([*Cell.__dataclass_fields__, "metric", "mean", "sd", "seeds"])
            for (cell, metric), values in self.figures.items():
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                mean = f"{statistics.mean(values):.6f}"
                lines.writerow([*asdict(cell).values(), metric, mean, f"{spread:.6f}", len(values)])
