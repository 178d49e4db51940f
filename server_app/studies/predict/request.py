"""The request of ``fedsilo predict``, with the checks before anything is opened."""

from dataclasses import dataclass
from pathlib import Path

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.studies.finetune.request import refuse_target
from fedsilo.server_app.studies.report.written import refuse_twice

_SOURCES = ("images", "manifest", "table", "split")


@dataclass(frozen=True)
class PredictRequest:
    """One call of ``predict``, with one of ``images``, ``manifest``, ``table`` and ``split``."""

    run_dir: Path
    site: str | None = None  # the site with the model; None for the model of all sites
    images: Path | None = None  # a folder of image files
    manifest: Path | None = None  # a CSV file whose column "path" names image files
    table: Path | None = None  # a CSV, Excel or Parquet file of rows, with or without labels
    id: str | None = None  # the column of the table that says which patient a row is of
    split: str | None = None  # train, val or test of the site's own data
    out: Path | None = None  # the CSV file to write, which must not exist, or None to write none
    html: Path | None = None  # the page of cases to write, or None to write none
    coverage: float | None = None  # coverage of prediction sets, between 0 and 1; None for no sets
    calibration: Path | None = None  # file of ``calibrate``; None for that in the run directory
    data_dir: Path | None = None  # None: the run's
    state_dir: Path | None = None  # the site's private state, or None for the run directory's
    answer_all: bool = False  # also cases that are unlike the training samples
    best: bool = False  # the best round's model, not the last one's

    def check(self) -> None:
        """Raise a SettingError for what cannot be done, before any work."""
        named = [f"--{name}" for name in _SOURCES if getattr(self, name) is not None]
        if len(named) != 1:
            raise SettingError(
                f"{' and '.join(named) or 'nothing'} is named to predict: give one of --images, "
                "--manifest, --table and --split"
            )
        if self.id is not None and self.table is None:
            raise SettingError(f"--id '{self.id}' is a column of a table: give --table too")
        if self.coverage is not None:
            check_coverage(self.coverage)
        tables = [self.out, document_path(self.out)] if self.out else []
        pages = [self.html] if self.html else []
        refuse_twice([*tables, *pages], "--html")
        for path in tables:
            refuse_target(path, "another --out")
        for path in pages:
            refuse_target(path, "another --html")


def document_path(out: Path) -> Path:
    """Return the path of the JSON next to a file of predictions."""
    return out.with_name(f"{out.name}.json")


def check_coverage(coverage: float) -> None:
    """Raise a SettingError if the coverage is not between 0 and 1."""
    if not 0 < coverage < 1:
        raise SettingError(f"--coverage is {coverage}; it must be above 0 and below 1, such as 0.9")
