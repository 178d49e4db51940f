"""A finished regression as tables: on the terminal, as CSV and as LaTeX.

All numbers are those of the run's ``fit.json``.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.comparison.latex import build_table, escape_latex
from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.one_line import format_count, join_names

if TYPE_CHECKING:
    from rich.table import Table

DOCUMENT = "fit.json"
_RATIOS = {"logistic": "odds ratio", "poisson": "rate ratio", "cox": "hazard ratio"}
_TITLES = {"logistic": "Logistic", "linear": "Linear", "poisson": "Poisson", "cox": "Cox"}


@dataclass(frozen=True)
class Regression:
    """A regression over hospitals.

    Attributes:
        path: the run directory.
        document: the content of ``fit.json``.
    """

    path: Path
    document: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Regression:
        """Read the regression of the finished run in the directory ``path``.

        Raises:
            RunDirectoryError: ``fit.json`` is missing, cannot be read, or is not JSON.
        """
        try:
            return cls(path, json.loads((path / DOCUMENT).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{path} has no {DOCUMENT} that can be read ({error}): name the directory of a "
                "finished 'fedsilo fit'"
            ) from None

    @property
    def ratio(self) -> str:
        """The name of an exponentiated coefficient; empty for a linear model."""
        return _RATIOS.get(self.document["family"], "")

    @property
    def coefficients(self) -> list[dict[str, Any]]:
        """A row for each coefficient, as in ``fit.json``. An intercept, if any, comes first."""
        rows: list[dict[str, Any]] = self.document["coefficients"]
        return rows

    def lines(self) -> Iterator[Table | str]:
        """Describe the regression for a terminal.

        Yields:
            A table of the coefficients, followed by a line on the fit, such as the log-likelihood.
            A table of the differences between hospitals follows if at least two hospitals could fit
            a coefficient on their data alone. The last sentence names the hospitals that could not,
            if any.
        """
        yield _table(self._title(), self._columns(), self._cells())
        yield self._measures()
        rows = list(self._heterogeneity_cells())
        if rows:
            columns = ("", "hospitals", "fixed effect", "random effects", "I²", "p of Q")
            title = f"Differences between hospitals ({self.ratio or 'coefficient'}, 95 % interval)"
            yield _table(title, columns, rows)
        lacking = self.document.get("sites-without-fit", [])
        if lacking:
            yield (
                f"without a fit of its own, so compared with no other: {join_names(lacking)} (the "
                "patients there alone determine no coefficients; the site's log says why)"
            )

    def _title(self) -> str:
        document = self.document
        outcome = document["outcome"]
        if "time" in document:
            outcome = f"{document['time']} to {outcome}, stratified by hospital"
        return f"{_TITLES[document['family']]} regression of {outcome} ({document['dataset']})"

    def _measures(self) -> str:
        document = self.document
        patients = format_count(document["patients"], "patient")
        if "events" in document:
            patients += f" ({format_count(document['events'], 'event')})"
        likelihood = "log-likelihood"
        if "ties" in document:
            likelihood = f"log partial likelihood ({document['ties'].capitalize()}'s ties)"
        return (
            f"{patients} at {format_count(len(document['hospitals']), 'hospital')}; "
            f"{likelihood} {document['log-likelihood']:.3f}, AIC {document['aic']:.2f}; "
            f"converged after {format_count(document['rounds'], 'round')} at trust "
            f"'{document['trust']}'"
        )

    def _columns(self) -> list[str]:
        statistic, interval = "z", f"95 % CI of {self.ratio}"
        if not self.ratio:
            statistic, interval = "t", "95 % CI"
        columns = ["", "coefficient", "std. error"]
        if self.ratio:
            columns.append(self.ratio)
        return [*columns, interval, statistic, "p"]

    def _cells(self) -> Iterator[list[str]]:
        for row in self.coefficients:
            cells = [row["name"], f"{row['estimate']:.5g}", f"{row['standard-error']:.4g}"]
            low, high = row["low"], row["high"]
            if self.ratio:
                cells.append(format_effect(row["ratio-estimate"]))
                low, high = row["ratio-low"], row["ratio-high"]
            interval = f"{format_effect(low)} to {format_effect(high)}"
            yield [*cells, interval, f"{row['statistic']:.2f}", format_p(row["p"])]

    def _heterogeneity_cells(self) -> Iterator[list[str]]:
        """Yield a row on the differences between hospitals for each coefficient.

        A coefficient needs at least two hospitals that fitted it on their data alone. Its row gives
        the name, the number of these hospitals, a fixed-effect estimate, and a random-effects
        estimate. The estimates are pooled over these hospitals, with 95 % intervals. The last cells
        are I² in percent and the p value of Cochran's Q.
        """
        for row in self.document.get("heterogeneity", []):
            if "fixed" not in row:
                continue
            cells = [row["name"], str(row["count"])]
            for effect in ("fixed", "random"):
                middle, low, high = self.effect(row[effect], row[f"{effect}-error"])
                cells.append(
                    f"{format_effect(middle)} ({format_effect(low)} to {format_effect(high)})"
                )
            yield [*cells, f"{100 * row['i-squared']:.0f} %", format_p(row["p"])]

    def effect(self, estimate: float, error: float) -> tuple[float, float, float]:
        """Return a coefficient as an effect with its 95 % interval: (estimate, low, high).

        The interval comes from the normal distribution. If the regression has ratios, such as odds
        ratios, the three values are exponentiated. They are first clipped to ±700, so that the
        results stay finite.

        Args:
            estimate: the coefficient.
            error: its standard error.
        """
        from scipy.stats import norm

        width = float(norm.ppf(0.975)) * error
        effect = (estimate, estimate - width, estimate + width)
        if not self.ratio:
            return effect
        import numpy as np

        # Beyond 709 the exponential overflows to infinity, which JSON and axes cannot show
        middle, low, high = np.exp(np.clip(effect, -700, 700)).tolist()
        return middle, low, high

    def write(self, csv_path: Path | None, latex_path: Path | None) -> None:
        """Write the coefficients to a CSV file and to a LaTeX file.

        The CSV file has full precision. The LaTeX file has a rounded table. A path that is None is
        skipped. Existing files are replaced.
        """
        if csv_path is not None:
            write_atomically(csv_path, self.csv())
        if latex_path is not None:
            write_atomically(latex_path, self.latex())

    def csv(self) -> str:
        """Format the coefficients as CSV with full precision, one row for each coefficient.

        The pooled coefficients come first, with "all" in the column "hospital". Then come the
        coefficients that each hospital fitted on its data alone, if ``fit.json`` has them.
        """
        rows = [{"hospital": "all", **row} for row in self.coefficients]
        for row in self.document.get("heterogeneity", []):
            for site, own in row["sites"].items():
                rows.append({"hospital": site, "name": row["name"], **own})
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def latex(self) -> str:
        """Return the coefficients as a LaTeX table (booktabs)."""
        rows = [[escape_latex(cell) for cell in row] for row in self._cells()]
        caption = escape_latex(f"{self._title()}: {self._measures()}.")
        return build_table(caption, "tab:regression", self._columns(), rows, 1)


def format_effect(value: float) -> str:
    """Format a ratio or coefficient: four decimals from 0.1 to 100, otherwise four digits."""
    if 0.1 <= abs(value) < 100:
        return f"{value:.4f}"
    return f"{value:.4g}"


def format_p(p: float) -> str:
    """Format a p value with three decimals. A value below 0.001 becomes '<0.001'."""
    if p < 0.001:
        return "<0.001"
    return f"{p:.3f}"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a table for the terminal. The first column is aligned left, the others right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table
