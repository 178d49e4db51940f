"""What is asked of a prediction, and what can be refused before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.studies.finetune.request import refuse_target


@dataclass(frozen=True)
class PredictRequest:
    """One call of ``predict``. One of ``images``, ``manifest``, ``table`` and ``split`` is given.

    Attributes:
        run_dir: the run directory.
        site: whose model; None: that of all sites.
        images: a folder of image files.
        manifest: a CSV file whose column ``path`` names image files.
        table: a CSV file of rows, with or without the label's column.
        split: train, val or test of the site's own data.
        out: the CSV file to write, not there yet; None: none is written.
        coverage: of the prediction sets, above 0 and below 1; None: no sets.
        calibration: the file that ``calibrate`` wrote; None: the run directory's, for ``coverage``.
        data_dir: the data directory; None: the run's.
        state_dir: the site's private state; None: the run directory's.
    """

    run_dir: Path
    site: str | None = None
    images: Path | None = None
    manifest: Path | None = None
    table: Path | None = None
    split: str | None = None
    out: Path | None = None
    coverage: float | None = None
    calibration: Path | None = None
    data_dir: Path | None = None
    state_dir: Path | None = None

    def check(self) -> None:
        """Refuse what cannot be, before work is done.

        Raises:
            SettingError: none or several sources are named, the coverage is out of range, or the
                output is there or cannot be written.
        """
        named = [
            f"--{name}"
            for name in ("images", "manifest", "table", "split")
            if getattr(self, name) is not None
        ]
        if len(named) != 1:
            raise SettingError(
                f"{' and '.join(named) or 'nothing'} is named to predict: give one of --images, "
                "--manifest, --table and --split"
            )
        if self.coverage is not None:
            check_coverage(self.coverage)
        if self.out is not None:
            for path in (self.out, document_path(self.out)):
                refuse_target(path, "another --out")


def document_path(out: Path) -> Path:
    """Return where the JSON beside a file of predictions lies."""
    return out.with_name(f"{out.name}.json")


def check_coverage(coverage: float) -> None:
    """Refuse a coverage outside 0..1, by a ``SettingError``."""
    if not 0 < coverage < 1:
        raise SettingError(f"--coverage is {coverage}; it must be above 0 and below 1, such as 0.9")
