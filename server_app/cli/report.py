"""``report``: finished runs as a page that people read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedsilo.server_app.cli.options import LOOK, RunDirsArgument, example

Reader = Literal["research", "clinic", "dpo"]

_For = Annotated[
    Reader,
    typer.Option(
        "--for",
        show_default=False,
        help="research: settings, curves, tests, cost; clinic: what is found and missed; dpo: "
        "what left each site (default research)",
    ),
]
_Out = Annotated[
    Path, typer.Option("--out", show_default=False, help="HTML to write (default report.html)")
]
_AuditLog = Annotated[
    Path | None, typer.Option("--audit-log", help="of dpo: the hospital's own audit log")
]
_SiteFile = Annotated[
    Path | None, typer.Option("--site-file", help="of dpo: the hospital's own site file")
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="write over a file that is there")]


def add_commands(app: typer.Typer) -> None:
    """Add ``report``."""
    app.command(
        "report",
        help="write a page about finished runs for people to read",
        epilog=example("report runs/heart --for clinic --out heart.html"),
        rich_help_panel=LOOK,
    )(_report)


def _report(
    run_dirs: RunDirsArgument,
    *,
    reader: _For = "research",
    out: _Out = Path("report.html"),
    audit_log: _AuditLog = None,
    site_file: _SiteFile = None,
    overwrite: _Overwrite = False,
) -> None:
    from fedsilo.server_app.studies.report.report import ReportOptions, write_report

    asked = ReportOptions(reader=reader, audit_log=audit_log, site_file=site_file)
    print(write_report(run_dirs, out, asked, overwrite=overwrite))
