"""``fedsilo report``: writes finished runs as one page for one of three kinds of readers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fedsilo.core.errors import SettingError
from fedsilo.pages.page import render_page, write_page
from fedsilo.reports.clinic import INTERVALS, TITLE, WARNING, Examination, clinic_data
from fedsilo.reports.dpo import dpo_data, site_file_data
from fedsilo.reports.hospital_files import read_audit_log, read_own_site_file
from fedsilo.reports.research import research_data
from fedsilo.reports.run_facts import reported_runs
from fedsilo.runs.finished_run import Shown

Reader = Literal["research", "clinic", "dpo"]
READERS: tuple[Reader, ...] = get_args(Reader)

_TITLES = {
    "research": "Federated runs, for research",
    "clinic": "A federated model, for the clinic",
    "dpo": "What left the hospitals, for data protection",
}
_NAMED = 4  # runs that the subtitle names


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
            SettingError: names the option that does not fit.
        """
        if self.reader not in READERS:
            raise SettingError(f"--for is '{self.reader}'; it must be one of {', '.join(READERS)}")
        for option, path in (("audit-log", self.audit_log), ("site-file", self.site_file)):
            if path and self.reader != "dpo":
                raise SettingError(f"--{option} belongs to a report '--for dpo': leave it out")
        if self.examine and self.reader != "clinic":
            raise SettingError("--by and --decisions belong to a report '--for clinic'")


def report(folders: Sequence[Path], options: ReportOptions) -> str:
    """Build the report of finished runs as HTML; the same runs give the same bytes.

    Args:
        folders: run directories, or folders that have run directories in them.
        options: the reader, and the files or sections that belong to this reader.

    Raises:
        SettingError: options contradict each other.
        RunDirectoryError: a folder holds no finished run, or a file of a run is missing or damaged.
        DataError: a file of the hospital cannot be used.
    """
    options.check()
    runs = reported_runs(folders)
    foot = "Written by fedsilo, research software."
    if options.reader == "clinic":
        foot = f"{TITLE}. {WARNING}"
    data = _BUILDERS[options.reader](runs, options)
    title = _TITLES[options.reader]
    return render_page(f"{options.reader}.html", title, data, subtitle=_subtitle(runs), foot=foot)


def _subtitle(runs: Sequence[Shown]) -> str:
    start = "Run"
    if len(runs) > 1:
        start = "Runs"
    more = ""
    if len(runs) > _NAMED:
        more = f" and {len(runs) - _NAMED} more"
    return f"{start}: {', '.join(run.name for run in runs[:_NAMED])}{more}"


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


def _build_research(runs: Sequence[Shown], options: ReportOptions) -> dict[str, Any]:
    return research_data(runs)


def _build_clinic(runs: Sequence[Shown], options: ReportOptions) -> dict[str, Any]:
    data = []
    for run in runs:
        examinations: Sequence[Examination] = ()
        if options.examine:
            examinations = options.examine(run)
        data.append(clinic_data(run, examinations))
    texts = {"title": TITLE, "warning": WARNING, "intervals": INTERVALS}
    return {**texts, "runs": _with_prefixes(runs, data)}


def _build_dpo(runs: Sequence[Shown], options: ReportOptions) -> dict[str, Any]:
    log = site_file = None
    if options.audit_log:
        log = read_audit_log(options.audit_log)
    if options.site_file:
        site_file = site_file_data(read_own_site_file(options.site_file))
    data = [dpo_data(run, log) for run in runs]
    return {"site_file": site_file, "runs": _with_prefixes(runs, data)}


# Reader -> function that builds the variables of the reader's template
_BUILDERS: dict[str, Callable[[Sequence[Shown], ReportOptions], dict[str, Any]]] = {
    "research": _build_research,
    "clinic": _build_clinic,
    "dpo": _build_dpo,
}


def _with_prefixes(runs: Sequence[Shown], data: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the prefix of a run's headings: with several runs on the page, the run's name."""
    prefixed = []
    for run, of_run in zip(runs, data, strict=True):
        prefix = ""
        if len(runs) > 1:
            prefix = f"{run.name}: "
        prefixed.append({"prefix": prefix, **of_run})
    return prefixed
