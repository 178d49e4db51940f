"""The state of a run as its directory shows it, or of a deployment and its newest run.

``Watched`` is the state of a run; ``View`` adds the processes of a deployment, the node of a
hospital, or the runs in a folder.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.one_line import as_word, format_count
from fedsilo.core.processes import process_of
from fedsilo.deployment.deployment import read_deployment
from fedsilo.pages.page import at_most
from fedsilo.server_app.records.progress import (
    FILE,
    Progress,
    Status,
    bytes_text,
    clock,
    format_metrics,
    metrics_text,
    read_progress,
)
from fedsilo.server_app.records.run_directory import refuse_links

# A hospital's site file brings Flower, which commands that only list do not need
if TYPE_CHECKING:
    from fedsilo.reports.watch.hospital import HospitalReader, HospitalState

_SILENT = 60.0  # seconds without a write after which a remote run is silent; it writes every 15


@dataclass(frozen=True)
class Watched:
    """The state of a run, as its directory shows it at one moment."""

    folder: Path  # the run directory
    progress: Progress  # the content of ``progress.json``
    gone: bool  # whether the process that wrote it was killed
    silent: bool  # whether it runs on another machine and has written nothing for a minute
    moment: float  # when the file was read, seconds since 1970

    @property
    def over(self) -> bool:
        """Whether the run has ended: finished, failed, interrupted or killed."""
        return self.gone or self.progress.state != "running"

    @property
    def seconds(self) -> float:
        """Return the seconds from the start of the run's process until now.

        If the run is over, the count ends with the last write of the process. A resumed run has a
        new process.
        """
        if self.over:
            return self.progress.seconds
        return self.progress.seconds + self._since()

    @property
    def seconds_left(self) -> float | None:
        """Estimate the seconds until the end of the run.

        The result is None until the process has finished a round, and after the run.
        """
        # The estimate dates from the last write of the file
        left = self.progress.seconds_left
        if left is None or self.over:
            return None
        return max(0.0, left - self._since())

    def _since(self) -> float:
        """Return the seconds since the file was written, at least 0 if clocks differ."""
        return max(0.0, self.moment - self.progress.updated.timestamp())

    def state(self) -> str:
        """Describe the state of the run in a few words, such as "running".

        If the run was interrupted, or if its process was killed, the text has the command that
        resumes the run. If it failed, the text has the reason. If it runs on another machine and
        has written nothing for a minute, the text says so.
        """
        again = f"'fedsilo resume {as_word(self.folder)}' continues it"
        if self.gone:
            return f"its process was killed: {again}"
        running = "running"
        if self.silent:
            running = "nothing written for a minute"
        texts: dict[Status, str] = {
            "running": running,
            "finished": "finished",
            "failed": f"failed: {self.progress.why}",
            "interrupted": f"interrupted: {again}",
        }
        return texts[self.progress.state]

    def in_words(self) -> str:
        """Describe in sentences how far the run has come.

        For a finished run, the sentence has the number of finished rounds. For a run that failed,
        was interrupted or was killed, the sentences have the state and the number of finished
        rounds.

        For a running run, the sentence has the current round. The progress of the phase, the sites
        that the server waits for, and the time left follow if they are known. If a run on another
        machine has written nothing for a minute, another sentence says so.
        """
        here = self.progress
        if here.state == "finished":
            return f"The run is finished after {format_count(here.finished_rounds, 'round')}."
        if self.over:
            done = f"{here.finished_rounds} of {here.rounds} rounds are finished."
            return f"The run is over: {self.state()}. {done}"
        parts = [f"The run is in round {here.round} of {here.rounds}"]
        if here.phase:
            parts += _waiting(here)
        if self.seconds_left is not None:
            parts.append(f"about {clock(self.seconds_left)} are left")
        text = f"{'; '.join(parts)}."
        if self.silent:
            text += " It has written nothing for a minute."
        return text

    def line(self) -> str:
        """Summarise the run in one line, with commas between the parts.

        The parts are the run's name with its state, the round, the current phase, the bytes
        received and sent by all sites, the spent epsilon, the time so far, and the time left. After
        the run, there is no phase. Without differential privacy, there is no epsilon. An unknown
        time left is omitted.
        """
        here = self.progress
        parts = [f"{here.run}: {self.state()}", f"round {here.round} of {here.rounds}"]
        if here.phase and not self.over:
            parts.append(phase_text(here))
        parts.append(traffic_text(here))
        spent = epsilon_text(here)
        if spent:
            parts.append(spent)
        parts.append(clock(self.seconds))
        if self.seconds_left is not None:
            parts.append(f"{clock(self.seconds_left)} left")
        return ", ".join(parts)


def _waiting(progress: Progress) -> list[str]:
    """Describe the progress of the current phase, such as "fit", in one to three phrases.

    The first phrase says how many of the asked sites have answered. If some sites have neither
    answered nor failed, a second phrase names these waiting sites. If waiting sites are not
    connected, a third phrase names them.
    """
    parts = [f"{len(progress.answered)} of {len(progress.asked)} hospitals have answered"]
    waiting = []
    for site in progress.asked:
        if site not in progress.answered and site not in progress.failed:
            waiting.append(site)
    if waiting:
        parts.append(f"it waits for {', '.join(waiting)}")
    away = [site for site in waiting if site in progress.away]
    if away:
        parts.append(f"of these {', '.join(away)} is not connected")
    return parts


def look_at(folder: Path) -> Watched:
    """Read the present state of a run from its directory, and check whether its process lives.

    In the result, ``gone`` is True if a run that is recorded as running has lost its process on
    this machine. A process on another machine cannot be checked. In that case, ``silent`` is True
    if the process has written nothing for a minute.

    Raises:
        RunDirectoryError: the folder is not a run directory, contains symbolic links that lead out
            of it, or is of another version of fedsilo.
    """
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise RunDirectoryError(
            f"there is no run directory {folder}: name one, or a deployment by --deployment"
        )
    refuse_links(folder)  # a link could put a file from elsewhere on the page
    progress = read_progress(folder)
    if progress is None:
        raise RunDirectoryError(
            f"{folder} has no {FILE}: it is not a run directory; name one, or --deployment DIR"
        )
    moment = time.time()
    gone = silent = False
    if progress.state == "running" and progress.host == socket.gethostname():
        # The start time too, because the system may have given the id to another process
        gone = process_of(progress.pid, progress.process_started) is None
    elif progress.state == "running":
        # A process on another machine cannot be seen; only its writes can
        silent = moment - progress.updated.timestamp() > _SILENT
    return Watched(folder, progress, gone, silent, moment)


def newest_run(runs: Path) -> Path | None:
    """Return the run directory in ``runs`` that was written to last; None without runs."""
    newest = max(runs.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return None
    return newest.parent


def phase_text(progress: Progress) -> str:
    """Format the current phase of a run in a few words, such as "fit: 3 of 5 answered".

    The names of sites that are not connected, and of sites that failed, follow.
    """
    text = f"{progress.phase}: {len(progress.answered)} of {len(progress.asked)} answered"
    if progress.away:
        text += f", away: {' '.join(progress.away)}"
    if progress.failed:
        text += f", failed: {' '.join(sorted(progress.failed))}"
    return text


def traffic_text(progress: Progress) -> str:
    """Format the bytes that all sites have received (down) and sent (up)."""
    bytes_ = progress.bytes()
    return f"{bytes_text(bytes_['down'])} down, {bytes_text(bytes_['up'])} up"


def epsilon_text(progress: Progress) -> str:
    """Format the largest epsilon that a site spent, and its cap, such as "epsilon 1.25 of 8".

    Without a cap, only the epsilon is shown. Without differential privacy, the text is empty.
    """
    spent = progress.epsilon()
    if spent is None:
        return ""
    if not progress.max_epsilon:
        return f"epsilon {at_most(spent)}"
    return f"epsilon {at_most(spent)} of {progress.max_epsilon:g}"


@dataclass(frozen=True)
class View:
    """The state of a run, of a deployment, of a hospital's node or of a folder of runs."""

    title: str
    # None: the deployment has not run anything yet, or the view is of a hospital or a folder
    run: Watched | None
    # A deployment's server and sites, each with whether its process runs
    members: tuple[tuple[str, bool], ...] = ()
    hospital: HospitalState | None = None  # set for a hospital's node, which has no run directory
    # The folder with the runs that may be shown, or the run itself; None for a hospital
    folder: Path | None = None
    # A row for each run in the columns ``RUN_COLUMNS``; None unless the view is of a folder of runs
    runs: tuple[tuple[str, ...], ...] | None = None

    def metrics_text(self) -> str:
        """Build the text with the metrics of the viewed parts, in Prometheus's format.

        The parts are a run's progress, the members of a deployment, and a hospital's node. For each
        member, the metric says whether its process runs. Without these parts, the text is empty.
        """
        text = ""
        if self.run:
            text += metrics_text(self.run.progress)
        if self.members:
            up = [({"member": member}, int(is_running)) for member, is_running in self.members]
            meaning = "Whether the member's process runs on this machine."
            text += format_metrics([("fedsilo_member_up", meaning, up)], {})
        if self.hospital:
            text += format_metrics(self.hospital.metrics(), {"site": self.hospital.site})
        return text

    def line(self) -> str:
        """Summarise the state in one line.

        - For a hospital's node, the line has the facts about its messages.
        - For a folder with runs, it has the number of runs in each state.
        - For a run or a deployment, it summarises the run, such as "hearts: running, round 3 of 10,
          ...".
        - Without any run, it says "no run yet".

        If members of a deployment are down, their names follow after a semicolon.
        """
        parts = [f"{self.title}: no run yet"]
        if self.run:
            parts = [self.run.line()]
        if self.runs:
            states = Counter(row[1] for row in self.runs)
            counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            parts = [f"{self.title}: {format_count(len(self.runs), 'run')}, {counts}"]
        if self.hospital:
            facts = ", ".join(f"{name} {text}" for name, text in self.hospital.facts())
            parts = [f"{self.title}: {facts}"]
        down = [member for member, runs in self.members if not runs]
        if down:
            parts.append(f"down: {' '.join(down)}")
        return "; ".join(parts)

    def site_rows(self) -> list[tuple[str, ...]]:
        """Format the state of each site of the run as a row of cells, sorted by site.

        The cells are those of ``SITE_COLUMNS``: site, present work, total time of work, bytes sent
        to the site, bytes received from it, peak memory and spent epsilon. An unknown memory or
        epsilon is "-". Without a run, the list is empty.
        """
        if self.run is None:
            return []
        rows: list[tuple[str, ...]] = []
        for site, progress in sorted(self.run.progress.sites.items()):
            peak = epsilon = "-"
            if progress.peak_memory_bytes:
                peak = bytes_text(progress.peak_memory_bytes)
            if progress.epsilon is not None:
                epsilon = at_most(progress.epsilon)
            row = (
                site,
                _doing(site, self.run),
                clock(progress.seconds),
                bytes_text(progress.bytes_down),
                bytes_text(progress.bytes_up),
                peak,
                epsilon,
            )
            rows.append(row)
        return rows


SITE_COLUMNS = ("site", "now", "worked", "down", "up", "peak memory", "epsilon")
RUN_COLUMNS = ("run", "state", "method", "data set", "rounds", "started (UTC)", "")
Look = Callable[[], View]


def look_at_run(folder: Path) -> View:
    """Read the state of a run, for a page or a terminal that shows this run.

    Raises:
        RunDirectoryError: the folder does not contain a run that this version can read.
    """
    run = look_at(folder)
    return View(run.progress.title, run, folder=run.folder)


def look_at_deployment(folder: Path) -> View:
    """Read which members of a deployment run on this machine, and the state of its newest run.

    Members are the server and the sites. The newest run is the one with the latest write to its
    files. If the deployment has no run yet, ``run`` is None in the result.

    Raises:
        FedsiloError: the folder does not contain a deployment, or the run is of another version.
    """
    deployment = read_deployment(folder)
    running = deployment.running()
    members = tuple((member, member in running) for member in deployment.members)
    newest = newest_run(deployment.runs)
    if newest is None:
        title = f"deployment {deployment.folder}"
        return View(title, None, members, folder=deployment.runs)
    run = look_at(newest)
    return View(run.progress.title, run, members, folder=deployment.runs)


def look_at_hospital(reader: HospitalReader) -> View:
    """Read the state of a hospital's node. Raises OSError if a file cannot be read."""
    state = reader.read()
    return View(f"hospital {state.site}", None, hospital=state)


def _doing(site: str, run: Watched) -> str:
    """Describe the present work of a site, such as "asked to fit", "answered" or "away".

    The first of these rules that applies decides the text:

    1. When the run is over, the text is empty.
    2. For a failed site, it is "left out: " and the reason.
    3. Between phases, the text is empty. It is also empty for a site that is not asked in this
       phase.
    4. For a site that has answered, it is "answered".
    5. For a site that is not connected, it is "away".
    6. Otherwise it is "asked to " and the phase.
    """
    here = run.progress
    if run.over:
        return ""
    # Failure first, because a failed site stays in the list of asked sites
    if site in here.failed:
        return f"left out: {here.failed[site]}"
    if not here.phase or site not in here.asked:
        return ""
    if site in here.answered:
        return "answered"
    if site in here.away:
        return "away"
    return f"asked to {here.phase}"
