"""A run as its directory shows it: how far it is, and whether it is still running."""

import socket
import time
from dataclasses import dataclass
from pathlib import Path

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.one_line import as_word, counted
from fedsilo.core.processes import process_of
from fedsilo.server_app.records.progress import (
    FILE,
    Progress,
    Status,
    bytes_text,
    clock,
    read_progress,
)
from fedsilo.server_app.records.run_directory import refuse_links

_SILENT = 60.0  # seconds after which a run of another machine counts as silent: it writes every 15


@dataclass(frozen=True)
class Watched:
    """A run directory and what it says of its run."""

    folder: Path  # the run directory
    progress: Progress  # the content of ``progress.json``
    gone: bool  # whether the process that wrote it was killed
    silent: bool  # whether it runs on another machine and has written nothing for a minute
    moment: float  # when the file was read, seconds since 1970

    @property
    def over(self) -> bool:
        """Whether the run has ended, in whatever way."""
        return self.gone or self.progress.state != "running"

    @property
    def seconds(self) -> float:
        """Seconds since the run's process began, until its last writing if it has ended."""
        return self.progress.seconds + (0.0 if self.over else self._since())

    @property
    def seconds_left(self) -> float | None:
        """Seconds left, or None before the first round and after the run."""
        left = self.progress.seconds_left
        return None if left is None or self.over else max(0.0, left - self._since())

    def _since(self) -> float:
        return max(0.0, self.moment - self.progress.updated.timestamp())

    def state(self) -> str:
        """Describe the state of the run, and what to do next."""
        again = f"'fedsilo resume {as_word(self.folder)}' continues it"
        if self.gone:
            return f"its process was killed: {again}"
        said: dict[Status, str] = {
            "running": "nothing written for a minute" if self.silent else "running",
            "finished": "finished",
            "failed": f"failed: {self.progress.why}",
            "interrupted": f"interrupted: {again}",
        }
        return said[self.progress.state]

    def in_words(self) -> str:
        """Return the state in sentences: how far the run is, and what it waits for."""
        here, left = self.progress, self.seconds_left
        if here.state == "finished":
            return f"The run is finished after {counted(here.finished_rounds, 'round')}."
        if self.over:
            done = f"{here.finished_rounds} of {here.rounds} rounds are finished."
            return f"The run is over: {self.state()}. {done}"
        waiting = [site for site in here.asked if site not in (*here.answered, *here.failed)]
        said = [f"The run is in round {here.round} of {here.rounds}"]
        if here.phase:
            said.append(f"{len(here.answered)} of {len(here.asked)} hospitals have answered")
        if here.phase and waiting:
            away = [site for site in waiting if site in here.away]
            said.append(f"it waits for {', '.join(waiting)}")
            said += [f"of these {', '.join(away)} is not connected"] if away else []
        if left is not None:
            said.append(f"about {clock(left)} are left")
        silent = " It has written nothing for a minute." if self.silent else ""
        return f"{'; '.join(said)}.{silent}"

    def line(self) -> str:
        """Return the state, the round, the costs and the times in one line."""
        here, left = self.progress, self.seconds_left
        parts = [
            f"{here.run}: {self.state()}",
            f"round {here.round} of {here.rounds}",
            phase_text(here) if here.phase and not self.over else "",
            traffic_text(here),
            epsilon_text(here),
            clock(self.seconds),
            "" if left is None else f"{clock(left)} left",
        ]
        return ", ".join(filter(None, parts))


def look_at(folder: Path) -> Watched:
    """Read the present state of a run directory.

    Raises:
        RunDirectoryError: it is not a run directory, or of another version of fedsilo.
    """
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise RunDirectoryError(
            f"there is no run directory {folder}: name one, or a deployment by --deployment"
        )
    refuse_links(folder)
    progress = read_progress(folder)
    if progress is None:
        raise RunDirectoryError(
            f"{folder} has no {FILE}: it is not a run directory; name one, or --deployment DIR"
        )
    here = progress.host == socket.gethostname()
    running, moment = progress.state == "running", time.time()
    gone = here and process_of(progress.pid, progress.process_started) is None
    silent = not here and moment - progress.updated.timestamp() > _SILENT
    return Watched(folder, progress, running and gone, running and silent, moment)


def newest_run(runs: Path) -> Path | None:
    """Return the run of a folder of runs that was written to last, or None if there is none."""
    newest = max(runs.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime, default=None)
    return newest and newest.parent


def phase_text(progress: Progress) -> str:
    """Return the current phase and who has answered."""
    text = f"{progress.phase}: {len(progress.answered)} of {len(progress.asked)} answered"
    for what, sites in (("away", progress.away), ("failed", sorted(progress.failed))):
        text += f", {what}: {' '.join(sites)}" if sites else ""
    return text


def traffic_text(progress: Progress) -> str:
    """Return the bytes sent down and up."""
    bytes_ = progress.bytes()
    return f"{bytes_text(bytes_['down'])} down, {bytes_text(bytes_['up'])} up"


def epsilon_text(progress: Progress) -> str:
    """Return the most that a site has spent, or "" without differential privacy."""
    spent = progress.epsilon()
    cap = f" of {progress.max_epsilon:g}" if progress.max_epsilon else ""
    return "" if spent is None else f"epsilon {spent:.3g}{cap}"
