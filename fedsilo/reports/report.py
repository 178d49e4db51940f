"""``fedsilo report``: finished runs as one file that people read, for one of three readers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fedsilo.core.errors import SettingError
from fedsilo.pages.page import render_page
from fedsilo.pages.written import write_page
from fedsilo.reports.clinic import (
    INTERVALS,
    TITLE,
    WARNING,
    Examination,
    clinic_data,
)
from fedsilo.reports.dpo import dpo_data, site_file_data
from fedsilo.reports.hospital_files import read_audit_log, read_own_site_file
from fedsilo.reports.research import research_data
from fedsilo.reports.runs import reported_runs
from fedsilo.runs.finished_run import Shown

Reader = Literal["research", "clinic", "dpo"]
READERS: tuple[Reader, ...] = get_args(Reader)

_TITLES = {
    "research": "Federated runs, for research",
    "clinic": "A federated model, for the clinic",
    "dpo": "What left the hospitals, for data protection",
}
_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of a report."""

    reader: Reader = "research"
    audit_log: Path | None = None  # a hospital's own, for ``dpo``
    site_file: Path | None = None  # a hospital's own, for ``dpo``
    # Makes further sections of a run, for ``clinic``, where the data are
    examine: Callable[[Shown], Sequence[Examination]] | None = None

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            SettingError: says what.
        """
        if self.reader not in READERS:
            raise SettingError(f"--for is '{self.reader}'; it must be one of {', '.join(READERS)}")
        for option, path in (("audit-log", self.audit_log), ("site-file", self.site_file)):
            if path and self.reader != "dpo":
                raise SettingError(f"--{option} belongs to a report '--for dpo': leave it out")
        if self.examine and self.reader != "clinic":
            raise SettingError("--by and --decisions belong to a report '--for clinic'")


def report(folders: Sequence[Path], options: ReportOptions) -> str:
    """Return the report of finished runs as HTML; the same runs give the same bytes.

    The folders are run directories, or have such.

    Raises:
        SettingError: options contradict each other.
        RunDirectoryError: a folder holds no finished run, or a file of it is missing or damaged.
        DataError: a file of the hospital cannot be used.
    """
    options.check()
    runs = reported_runs(folders)
    names = [run.name for run in runs]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return render_page(
        f"{options.reader}.html",
        _TITLES[options.reader],
        _data(runs, options),
        subtitle=f"{'Run' if len(runs) == 1 else 'Runs'}: {', '.join(names[:_NAMED])}{more}",
        foot=f"{TITLE}. {WARNING}"
        if options.reader == "clinic"
        else "Written by fedsilo, research software.",
    )


def write_report(
    folders: Sequence[Path],
    out: Path,
    options: ReportOptions,
    *,
    overwrite: bool = False,
) -> Path:
    """Write the report and return its file.

    Raises:
        FedsiloError: as ``report`` and ``write_page``.
    """
    options.check()
    return write_page(out, lambda: report(folders, options), overwrite=overwrite)


def _data(runs: Sequence[Shown], options: ReportOptions) -> dict[str, Any]:
    """Build the variables of the reader's template."""
    if options.reader == "research":
        return research_data(runs)
    prefixes = [""] if len(runs) == 1 else [f"{run.name}: " for run in runs]
    texts: dict[str, Any]
    if options.reader == "clinic":
        examine = options.examine or (lambda run: ())
        found = [clinic_data(run, examine(run)) for run in runs]
        texts = {"title": TITLE, "warning": WARNING, "intervals": INTERVALS}
    else:
        log = read_audit_log(options.audit_log) if options.audit_log else None
        file = read_own_site_file(options.site_file) if options.site_file else None
        found = [dpo_data(run, log) for run in runs]
        texts = {"site_file": file and site_file_data(file)}
    prefixed = zip(prefixes, found, strict=True)
    return {**texts, "runs": [{"prefix": prefix, **data} for prefix, data in prefixed]}
