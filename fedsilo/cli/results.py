"""Shows the results of commands: on the terminal, and in files that options name.

Each function takes the result of the command of the same name first. Its other arguments are
options of the command line; an argument with the same name as one of the command is passed to both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsilo.api.options import MaybePath
from fedsilo.cli.list_results import experiments as experiments
from fedsilo.cli.list_results import methods as methods
from fedsilo.cli.list_results import settings as settings
from fedsilo.cli.model_results import calibrate as calibrate
from fedsilo.cli.model_results import finetune as finetune
from fedsilo.cli.model_results import monitor as monitor
from fedsilo.cli.model_results import predict as predict
from fedsilo.cli.printing import AsJson, line, print_columns, print_json, print_result
from fedsilo.cli.run_results import runs as runs
from fedsilo.core.arguments import AnyPath, path_of
from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import as_word, format_count

if TYPE_CHECKING:
    from fedsilo.comparison.crossvalidate import CrossValidation
    from fedsilo.comparison.over_seeds import Comparison
    from fedsilo.comparison.tune import Tuned
    from fedsilo.deployment.backup.backup import MadeBackup, Restored
    from fedsilo.deployment.deployment import Deployment
    from fedsilo.deployment.doctor.findings import Finding
    from fedsilo.deployment.joining import MadeKit
    from fedsilo.deployment.member_status import MemberStatus
    from fedsilo.reports.audit import Audit
    from fedsilo.reports.regression import Regression
    from fedsilo.reports.watch.view import View
    from fedsilo.runs.finished_run import FinishedRun


def _print_labelled(label: str) -> Callable[[object], None]:
    return lambda result: line(f"{label}: {result}")


pretrain, survey, deploy_run = map(_print_labelled, ("weights", "page", "run directory"))


def watch(
    look: Callable[[], View],
    *,
    once: Annotated[bool, "print one line and end"] = False,
    port: Annotated[int | None, "serve pages on this port, 0 for any free port"] = None,
    address: Annotated[
        str | None, "with --port: the address of this machine (default: 127.0.0.1)"
    ] = None,
) -> None:
    """Show the progress of runs: print one line, serve web pages, or redraw the terminal.

    ``look`` reads the present progress at each update. With ``once``, a line with the progress is
    printed. With ``port``, pages are served until Ctrl-C, even after the end of a run. Otherwise
    the terminal is redrawn until Ctrl-C, or until the end of the run if a single run is shown.
    Ctrl-C does not stop the runs.

    Raises:
        SettingError: both ``once`` and ``port`` are given, or ``address`` without ``port``.
        FedsiloError: the progress cannot be read.
    """
    if once and port is not None:
        raise SettingError(
            "--once prints one line and ends, but --port serves a page: give only one of them"
        )
    if address is not None and port is None:
        raise SettingError("--address is the address of the pages: give --port, too")
    # Called once here, so that an error is a line on the terminal and not a page
    view = look()
    if once:
        line(view.line())
    elif port is not None:
        from fedsilo.reports.watch.web.serve import HOST, WatchServer

        server = WatchServer(port, look, address or HOST)
        line(f"{view.line()}\n{server.address} (interrupt to end; runs continue)")
        if not server.is_local:
            line("everybody who reaches this address can read the pages: they have no password")
        # Ctrl-C ends the pages; a run continues in its own process
        with suppress(KeyboardInterrupt):
            server.serve()
    else:
        from fedsilo.reports.watch.follow import follow
        from fedsilo.server_app.run.terminal import make_console

        with suppress(KeyboardInterrupt):
            follow(look, make_console())


def simulate(run: FinishedRun) -> None:
    """Print the commands that a user usually runs next on a finished run."""
    path, page = as_word(run.path), as_word(Path(f"{run.path.name}.html"))
    line(f"next:  fedsilo report {path} --out {page}   write a page of the results")
    line(f"       fedsilo card {path}   write a model card")
    line(f"       fedsilo predict {path} --help   predict new samples")


resume = simulate


def fit(
    result: Regression,
    *,
    csv: Annotated[
        MaybePath, "also write coefficients, and each hospital's own, as CSV with all digits"
    ] = None,
    latex: Annotated[MaybePath, "also write the coefficients as LaTeX (booktabs)"] = None,
    picture: Annotated[
        MaybePath, "also draw a forest plot of the hospitals (.png, .svg or .pdf)"
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a regression as text or as JSON, and write the files that are named.

    ``csv`` and ``latex`` name files for the coefficients, and ``picture`` one for a forest plot of
    the hospitals. None writes no file. If a picture is drawn, its path is printed unless
    ``as_json`` is set.

    Raises:
        SettingError: the forest plot cannot be drawn, because the fit has no separate regression
            for each hospital.
    """
    if as_json:
        print_json(result.document)
    else:
        print_result(result.lines())
    result.write(path_of(csv), path_of(latex))
    if picture is not None:
        from fedsilo.pictures.forest import draw_forest

        draw_forest(result.document, result.effect, result.ratio, Path(picture))
        if not as_json:
            line(f"picture: {picture}")


def tune(result: Tuned, *, as_json: AsJson = False) -> None:
    """Print the best points and the choice, or the content of ``chosen.json`` as JSON."""
    if as_json:
        print_json(result.document)
    else:
        print_result(result)


def compare(
    result: Comparison,
    *,
    median: Annotated[bool, "show median and range over seeds instead of mean and sd"] = False,
    csv: Annotated[
        MaybePath,
        "also write the table as CSV, with NAME-budgets.csv and NAME-tests.csv next to it",
    ] = None,
    markdown: Annotated[MaybePath, "also write table and tests as Markdown"] = None,
    latex: Annotated[
        MaybePath, "also write table and tests as LaTeX (booktabs), with 95 % intervals"
    ] = None,
    picture: Annotated[
        MaybePath, "also draw each metric by site or distribution (.png, .svg or .pdf)"
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a comparison as text or as JSON, and write it to files.

    The text has the results, the budgets, the tests, and remarks on the results. With ``median``,
    it shows median and range over seeds in place of mean and deviation. ``csv``, ``markdown``,
    ``latex`` and ``picture`` name the files. None writes no file. If a picture is drawn, its path
    is printed unless ``as_json`` is set.
    """
    if as_json:
        print_json(result.document())
    else:
        print_result(result.lines(median))
    result.write(path_of(csv), path_of(markdown), median, latex=path_of(latex))
    if picture is not None:
        result.draw(Path(picture))
        if not as_json:
            line(f"picture: {picture}")


def crossvalidate(
    result: CrossValidation,
    *,
    csv: Annotated[MaybePath, "also write the numbers as CSV"] = None,
    markdown: Annotated[MaybePath, "also write the tables as Markdown"] = None,
    as_json: AsJson = False,
) -> None:
    """Print a cross-validation as text or as JSON, and write it to files.

    The text has a table for each metric. A path that is None writes no file.
    """
    if as_json:
        print_json(result.document())
    else:
        print_result(result)
    result.write(path_of(csv), path_of(markdown))


def deploy_up(deployment: Deployment) -> None:
    """Print two lines: the sites of this machine that are online, and how other hospitals join.

    The first line is left out if the deployment has no sites on this machine. The second line is
    left out if the server has no address that other machines can reach.
    """
    if deployment.sites:
        line(f"{format_count(len(deployment.sites), 'site')} online: {', '.join(deployment.sites)}")
    if deployment.address:
        line(
            f"hospitals reach the server at {deployment.address}; to add one: "
            "fedsilo deploy add NAME"
        )


def deploy_add(made: Iterable[MadeKit]) -> None:
    """Print each kit that the operator hands over, with the code to compare by telephone."""
    for one in made:
        line(f"{one.site}: {one.path} (code {one.code})")
    line("a kit holds a private key: hand it over encrypted, compare the code by telephone")


def deploy_renew(made: MadeKit | str) -> None:
    """Print the new kit, or the text that describes the renewal."""
    if isinstance(made, str):
        line(made)
    else:
        deploy_add([made])


def deploy_backup(made: MadeBackup) -> None:
    """Print two lines about a new backup.

    The first line has its path, its number of files and its size. The second line tells the user to
    keep the backup on another machine and its passphrase elsewhere.
    """
    from fedsilo.server_app.records.progress import bytes_text

    files = format_count(len(made.manifest.files), "file")
    line(f"{made.path}: {files}, {bytes_text(made.size)}, encrypted")
    line("keep it on another machine, and its passphrase elsewhere: without it nothing opens")


def deploy_restore(restored: Restored, *, deployment: AnyPath) -> None:
    """Print the result of restoring a backup.

    The first line has the folder, the number of files and the time of the backup. Then come notes
    for the operator, such as that versions differ. The last line is the command that starts the
    deployment.
    """
    files = format_count(len(restored.manifest.files), "file")
    line(f"{restored.deployment.folder}: {files} of the backup of {restored.manifest.made}")
    for note in restored.notes:
        line(f"note: {note}")
    line(f"to start it: fedsilo deploy up --deployment {as_word(Path(deployment))}")


def deploy_status(
    members: list[MemberStatus], *, deployment: AnyPath, as_json: AsJson = False
) -> None:
    """Print the members of a deployment as a table, then the progress of its newest run as a line.

    The table has each member's process, when the server last saw it, and its log file. A missing
    value is "-". If nothing has run yet, the line is left out. With ``as_json``, only a JSON list
    of the members is printed.
    """
    if as_json:
        line(json.dumps([asdict(member) for member in members], indent=2, default=str))
        return
    from fedsilo.reports.watch.view import look_at_deployment

    rows = []
    for member in members:
        # A server in a container writes its log to the engine's, and a member may not have run yet
        log = "-"
        if member.log and member.log.is_file():
            log = str(member.log)
        rows.append((member.member, str(member.pid or "-"), member.last_seen, log))
    print_columns(("member", "process", "seen by the server", "log"), rows)
    run = look_at_deployment(Path(deployment)).run
    if run:
        line(run.line())


def _print_findings(target: str) -> Callable[..., None]:
    """Make the function that shows the results of ``fedsilo doctor <target>``.

    The function takes the findings of the checks. It prints each finding as soon as its check ends,
    then a summary such as "3 passed, 0 failed, 1 skipped". With ``as_json`` it prints a single JSON
    document at the end instead. It raises ``typer.Exit`` with code 1 if a check failed, or with
    code 3 if none failed and none passed.
    """

    def show(findings: Iterable[Finding], *, as_json: AsJson = False) -> None:
        from fedsilo.deployment.doctor.findings import (
            build_document,
            exit_code,
            format_finding,
            summarise,
        )

        seen: list[Finding] = []
        # Each line is printed as its check ends, because a silent server takes seconds. JSON is one
        # document, so it waits for all
        for finding in findings:
            seen.append(finding)
            if not as_json:
                print_result(format_finding(finding))
        said = summarise(seen)
        if as_json:
            said = json.dumps(build_document(target, seen), indent=2)
        line(said)
        code = exit_code(seen)
        if code:
            raise typer.Exit(code)

    return show


doctor_site, doctor_server, doctor_run = map(_print_findings, ("site", "server", "run"))


def audit(
    found: Audit,
    *,
    csv: Annotated[MaybePath, "also write the chosen messages as CSV"] = None,
    as_json: AsJson = False,
) -> None:
    """Print the audit of a hospital's log, as text or as JSON.

    The text lists the messages that left the hospital, as far as the user selected them. It also
    says whether the check values that link the lines of the log are intact. If ``csv`` is given,
    the messages are also written to that file. Its path is printed unless ``as_json`` is set.

    Raises:
        typer.Exit: lines of the log were altered, removed or inserted. The exit code is 1.
            Everything is printed and written first.
    """
    if as_json:
        print_json(found.document())
    else:
        print_result(found.lines())
    if csv is not None:
        from fedsilo.core.files.atomic_files import write_atomically

        write_atomically(Path(csv), found.csv())
        if not as_json:
            line(f"table: {csv}")
    if found.breaks:
        raise typer.Exit(1)


def datasets(rows: list[dict[str, str]], *, as_json: AsJson = False) -> None:
    """Print the data sets as a table or as JSON.

    The columns of the table are the keys "name", "kind", "tasks", "licence", "terms", "size" and
    "here" of each row. JSON has all keys of the rows.
    """
    if as_json:
        print_json(rows)
        return
    keys = ("name", "kind", "tasks", "licence", "terms", "size", "here")
    cells = []
    for row in rows:
        cells.append([row[key] for key in keys])
    print_columns(("data set", *keys[1:]), cells)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Make a context manager that draws a progress bar on standard error during its block.

    If standard error is not a terminal, nothing is drawn. ``what`` is the text before the bar. The
    bar disappears at the end of the block.

    Yields:
        A function that updates the bar. Its arguments are the amount done and the total amount.
    """
    from rich.console import Console
    from rich.progress import Progress

    # The bar goes to standard error, so the output can be piped; without a terminal it is hidden
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
