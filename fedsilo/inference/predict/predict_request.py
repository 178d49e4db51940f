"""Checks the options of ``fedsilo predict`` before anything is opened."""

from dataclasses import dataclass
from pathlib import Path

from fedsilo.core.arguments import refuse_target
from fedsilo.core.errors import SettingError
from fedsilo.pages.page import refuse_twice


@dataclass(frozen=True)
class CaseSource:
    """The source of the cases to predict.

    Attributes:
        kind: ``images``, a folder of image files; ``manifest``, a CSV file whose column "path"
            names image files; ``table``, a CSV, Excel or Parquet file of rows, with or without
            labels; or ``split``, train, val or test of the site's own data.
        where: the folder, the file, or the name of the split.
        id_column: the column of the table with the patients' ids, or None.
    """

    kind: str
    where: Path | str
    id_column: str | None = None

    @property
    def path(self) -> Path:
        """The folder or the file."""
        return Path(self.where)


def choose_source(id_column: str | None, **named: Path | str | None) -> CaseSource:
    """Return the source of cases that is named; there must be exactly one.

    Args:
        id_column: the column of the table with the patients' ids, or None.
        named: kind of source -> folder, file or split; None for a kind that is not named.

    Raises:
        SettingError: no source or several are named, or a column of ids without a table.
    """
    given = []
    for kind, where in named.items():
        if where is not None:
            given.append(CaseSource(kind, where))
    if len(given) != 1:
        names = " and ".join(f"--{source.kind}" for source in given)
        raise SettingError(
            f"{names or 'nothing'} is named to predict: give one of --images, --manifest, --table "
            "and --split"
        )
    (source,) = given
    if id_column is not None and source.kind != "table":
        raise SettingError(f"--id '{id_column}' is a column of a table: give --table too")
    return CaseSource(source.kind, source.where, id_column)


def check_outputs(out: Path | None, html: Path | None) -> None:
    """Check that the files of a prediction can be written: table, its JSON, and page.

    Raises:
        SettingError: a file exists, its folder cannot be written, or two files are one.
    """
    tables = []
    if out:
        tables = [out, document_path(out)]
    pages = []
    if html:
        pages = [html]
    # Before the check of each file, because both could be free but the same
    refuse_twice([*tables, *pages], "--html")
    for path in tables:
        refuse_target(path, "another --out")
    for path in pages:
        refuse_target(path, "another --html")


def document_path(out: Path) -> Path:
    """Return the path of the JSON next to a file of predictions."""
    return out.with_name(f"{out.name}.json")


def check_coverage(coverage: float | None) -> None:
    """Raise a SettingError if the coverage is not between 0 and 1; None passes."""
    if coverage is not None and not 0 < coverage < 1:
        raise SettingError(f"--coverage is {coverage}; it must be above 0 and below 1, such as 0.9")
