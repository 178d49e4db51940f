"""``fedsilo report``: finished runs as one file that people read, for one of three readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.studies.report.clinic import TITLE, WARNING, clinic_sections
from fedsilo.server_app.studies.report.dpo import HospitalFiles, dpo_sections
from fedsilo.server_app.studies.report.hospital_files import read_audit_log, read_own_site_file
from fedsilo.server_app.studies.report.page import Section, Text, page
from fedsilo.server_app.studies.report.research import research_sections
from fedsilo.server_app.studies.report.runs import ReportedRun, reported_runs

Reader = Literal["research", "clinic", "dpo"]
READERS: tuple[Reader, ...] = get_args(Reader)

_TITLES = {
    "research": "Federated runs, for research",
    "clinic": "A federated model, for the clinic",
    "dpo": "What left the hospitals, for data protection",
}
_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class AskedReport:
    """What a report is to be.

    Attributes:
        reader: for whom.
        audit_log: a hospital's own audit log, for ``dpo``; None: none.
        site_file: a hospital's own site file, for ``dpo``; None: none.
    """

    reader: Reader = "research"
    audit_log: Path | None = None
    site_file: Path | None = None

    def check(self) -> None:
        """Refuse what cannot be asked for together.

        Raises:
            SettingError: says what.
        """
        if self.reader not in READERS:
            raise SettingError(f"--for is '{self.reader}'; it must be one of {', '.join(READERS)}")
        for option, path in (("audit-log", self.audit_log), ("site-file", self.site_file)):
            if path and self.reader != "dpo":
                raise SettingError(f"--{option} belongs to a report '--for dpo': leave it out")


def report(folders: Sequence[Path], asked: AskedReport) -> str:
    """Return the report of finished runs as HTML; the same runs give the same bytes.

    Args:
        folders: run directories, or folders of such.
        asked: for whom it is.

    Raises:
        SettingError: options contradict each other.
        RunDirectoryError: a folder holds no finished run, or a file of it is missing or damaged.
        DataError: a file of the hospital cannot be used.
    """
    asked.check()
    runs = reported_runs(folders)
    names = [run.name for run in runs]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return page(
        _TITLES[asked.reader],
        _sections(runs, asked),
        subtitle=f"{'Run' if len(runs) == 1 else 'Runs'}: {', '.join(names[:_NAMED])}{more}",
        foot=f"{TITLE}. {WARNING}"
        if asked.reader == "clinic"
        else "Written by fedsilo, research software.",
    )


def write_report(
    folders: Sequence[Path], out: Path, asked: AskedReport, *, overwrite: bool = False
) -> Path:
    """Write the report, whole or not at all; return its place.

    Raises:
        SettingError: ``out`` exists and is not to be overwritten, or is a folder.
        FedsiloError: as ``report``.
    """
    asked.check()
    if out.is_dir():
        raise SettingError(f"{out} is a folder: name a file, such as {out / 'report.html'}")
    if out.exists() and not overwrite:
        raise SettingError(f"{out} exists: choose another --out, or say --overwrite")
    write_atomically(out, report(folders, asked))
    return out


def _sections(runs: Sequence[ReportedRun], asked: AskedReport) -> list[Section]:
    if asked.reader == "research":
        return research_sections(runs)
    if asked.reader == "clinic":
        warning = Section(TITLE, [Text([WARNING], warning=True)])
        return [warning, *_of_each(runs, clinic_sections)]
    files = HospitalFiles(
        read_audit_log(asked.audit_log) if asked.audit_log else None,
        read_own_site_file(asked.site_file) if asked.site_file else None,
    )
    return _of_each(runs, lambda run: dpo_sections(run, files))


def _of_each(
    runs: Sequence[ReportedRun], sections: Callable[[ReportedRun], list[Section]]
) -> list[Section]:
    """Return the sections of each run, with its name before their titles if there are several."""
    if len(runs) == 1:
        return sections(runs[0])
    return [
        replace(section, title=f"{run.name}: {section.title}")
        for run in runs
        for section in sections(run)
    ]
