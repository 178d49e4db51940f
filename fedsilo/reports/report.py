"""Builds the report of finished runs: one page for one of three kinds of readers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedsilo.pages.page import render_page
from fedsilo.reports.clinic import INTERVALS, TITLE, WARNING, Examination, clinic_data
from fedsilo.reports.dpo import dpo_data, site_file_data
from fedsilo.reports.hospital_files import read_audit_log, read_own_site_file
from fedsilo.reports.research import research_data
from fedsilo.reports.run_facts import reported_runs
from fedsilo.runs.finished_run import Shown

_TITLES = {
    "research": "Federated runs, for research",
    "clinic": "A federated model, for the clinic",
    "dpo": "What left the hospitals, for data protection",
}
READERS = tuple(_TITLES)
_NAMED = 4  # largest number of runs that the subtitle names

Examine = Callable[[Shown], Sequence[Examination]]


def report(
    folders: Sequence[Path],
    reader: str = "research",
    *,
    examine: Examine | None = None,
    audit_log: Path | None = None,
    site_file: Path | None = None,
) -> str:
    """Build a page in HTML about finished runs, for one kind of reader.

    The same arguments give the same HTML, as long as the files that the page needs do not change.

    Args:
        folders: run directories, or folders that contain run directories.
        reader: ``research``, ``clinic`` or ``dpo`` (data protection officer).
        examine: takes a run and returns further sections, built from the sites' data. Only for
            ``clinic``.
        audit_log: the audit log of a hospital. Only for ``dpo``.
        site_file: the file with the rules of a hospital. Only for ``dpo``.

    Raises:
        RunDirectoryError: a folder does not contain a finished run, or a file of a run is missing
            or damaged.
        DataError: a file of the hospital cannot be read or is not valid, or one of the runs has no
            line in the log.
    """
    runs = reported_runs(folders)
    foot = "Written by fedsilo, research software."
    if reader == "research":
        data = research_data(runs)
    elif reader == "clinic":
        data = _clinic_page(runs, examine)
        foot = f"{TITLE}. {WARNING}"
    else:
        data = _dpo_page(runs, audit_log, site_file)
    # A page of many runs names the first ones, because the subtitle is one line
    subtitle = f"Run: {runs[0].name}"
    if len(runs) > 1:
        subtitle = f"Runs: {', '.join(run.name for run in runs[:_NAMED])}"
    if len(runs) > _NAMED:
        subtitle += f" and {len(runs) - _NAMED} more"
    return render_page(f"{reader}.html", _TITLES[reader], data, subtitle=subtitle, foot=foot)


def _clinic_page(runs: Sequence[Shown], examine: Examine | None) -> dict[str, Any]:
    """Build the template variables of ``clinic.html``, with a section for each run.

    ``runs`` has the sections. A section has the variables of ``clinic_data``, and a ``prefix`` for
    its headings. The keys ``title``, ``warning`` and ``intervals`` hold fixed texts for the whole
    page.

    Args:
        runs: the runs.
        examine: builds further parts of a run's section from the sites' data; None for no further
            parts.
    """
    sections = []
    for run in runs:
        examinations: Sequence[Examination] = ()
        if examine:
            examinations = examine(run)
        sections.append({"prefix": _prefix(run, runs), **clinic_data(run, examinations)})
    return {"title": TITLE, "warning": WARNING, "intervals": INTERVALS, "runs": sections}


def _dpo_page(
    runs: Sequence[Shown], audit_log: Path | None, site_file: Path | None
) -> dict[str, Any]:
    """Build the template variables of ``dpo.html``, the page for a data protection officer.

    ``runs`` has a section for each run. ``site_file`` has the rules of the hospital.

    Args:
        runs: the runs.
        audit_log: the hospital's audit log, for a summary in each section; None for no summary.
        site_file: the file with the hospital's rules; None for a page without rules.

    Raises:
        DataError: one of the files cannot be read or is not valid, or one of the runs has no line
            in the audit log.
    """
    log = own_file = None
    if audit_log:
        log = read_audit_log(audit_log)
    if site_file:
        own_file = site_file_data(read_own_site_file(site_file))
    sections = []
    for run in runs:
        sections.append({"prefix": _prefix(run, runs), **dpo_data(run, log)})
    return {"site_file": own_file, "runs": sections}


def _prefix(run: Shown, runs: Sequence[Shown]) -> str:
    """Return the text that begins the headings of a run's section: the run's name and a colon.

    If the page has only one run, the text is empty.
    """
    if len(runs) == 1:
        return ""
    return f"{run.name}: "
