"""The hook that follows a run: it prints lines on the terminal and writes the progress files.

The hook only observes. A separate thread writes the files, at most once a second. A failure in this
hook is logged once and never stops the run.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from statistics import fmean
from threading import Event, Lock, Thread
from typing import Any

import psutil

from fedsilo.core.one_line import format_count, one_line
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.tasks.task import task_of
from fedsilo.server_app.records.privacy_account import PrivacyHook
from fedsilo.server_app.records.progress import (
    FILE,
    Progress,
    SiteProgress,
    Status,
    clock,
    write_progress,
)
from fedsilo.server_app.records.recorder import Recorder
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.records.summary import join_names
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants

_PAUSE = 1.0  # seconds; the shortest pause between two writings
_REST = 400.0  # a pause is at least 400 times a writing's time, so writing costs 1/400 of a core
_STILL_HERE = 15.0  # the files are written after this many seconds even if nothing has happened
_PATIENCE = 5.0  # seconds for the thread to end
Marks = Callable[[State], Mapping[int, str]]


def _never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of ``ProgressHook`` so that a failure of the display cannot stop the run.

    The method handles an event of the run, and is called under the hook's lock. If it succeeds, the
    thread that writes the progress files is woken. If it raises an exception, the exception is
    passed to ``report``, and nothing is raised.
    """

    @functools.wraps(method)
    def call_safely(self: ProgressHook, *arguments: Any) -> None:
        try:
            with self.lock:
                method(self, *arguments)
            self.due.set()
        except Exception as error:  # no failure of this hook may stop the run
            self.report(error)

    return call_safely


class ProgressHook(Hook):
    """Shows the progress of a run: on the terminal, and in files for ``fedsilo watch``.

    Attributes:
        directory: the run directory, where the files are written.
        recorder: holds the costs and metrics of the sites.
        privacy: holds the epsilon of the sites; None without differential privacy.
        marks: returns the method's remarks by round.
        say: prints a line.
        progress: the progress that the files show.
    """

    def __init__(
        self,
        directory: RunDirectory,
        common: CommonSettings,
        title: str,
        marks: Marks,
        recorder: Recorder,
        privacy: PrivacyHook | None,
        say: Callable[[str], None],
    ) -> None:
        moment, self.process = datetime.now(UTC), psutil.Process()
        self.directory, self.recorder, self.privacy = directory, recorder, privacy
        self.marks, self.say = marks, say
        self.measured = task_of(common).progress
        self.lock, self.due, self.ending = Lock(), Event(), Event()
        self.reported = False
        self.began = self.round_began = time.monotonic()
        self.first, self.sites = 0, list[str]()
        self.progress = Progress(
            run=directory.path.name,
            title=title,
            method=common.method,
            dataset=common.dataset,
            seed=common.seed,
            rounds=common.rounds,
            pid=os.getpid(),
            process_started=self.process.create_time(),
            started=moment,
            updated=moment,
            max_epsilon=common.max_epsilon,
        )

    @contextmanager
    def following(self) -> Iterator[None]:
        """Write the progress files while the ``with`` block runs, and record how the block ended.

        A thread writes the files, and gets 5 seconds at the end. The recorded state is one of
        these:

        - "finished": the block raised nothing.
        - "failed": the block raised an Exception, whose text is recorded too.
        - "interrupted": the block raised another BaseException, such as KeyboardInterrupt. Its
          arguments become the path of the run directory, for the advice to resume.

        Every exception is raised again.
        """
        thread = Thread(target=self._write_until_ended, name="progress", daemon=True)
        thread.start()
        try:
            yield
            self._end("finished")
        except Exception as error:
            self._end("failed", one_line(error))
            raise
        except BaseException as error:  # Ctrl-C, or a signal of Slurm
            self._end("interrupted")
            # The command uses the path to say how to resume the run
            error.args = (str(self.directory.path),)
            raise
        finally:
            self.ending.set()
            self.due.set()
            thread.join(_PATIENCE)

    @_never_raises
    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        """Print the title, the sites and the number of rounds, and note the rounds in the progress.

        In a resumed run, a second line names the last finished round. An error is passed to
        ``report`` and is not raised.
        """
        self.first, self.sites = state.round, participants.sites()
        self.progress.rounds, self.progress.finished_rounds = total_rounds, state.round
        sites = f"{format_count(len(self.sites), 'site')} ({join_names(self.sites)})"
        self.say(f"{self.progress.title}: {sites}, {format_count(total_rounds, 'round')}")
        if state.round:
            self.say(f"resuming after round {state.round}")

    @_never_raises
    def participants_changed(
        self, round_: int, participants: Participants, joined: list[str]
    ) -> None:
        """Print the sites that have joined."""
        self.sites = participants.sites()
        self.say(f"round {round_}: {join_names(joined)} joined")

    @_never_raises
    def phase_started(self, round_: int, phase: str, sites: list[str]) -> None:
        """Record the phase and the sites that it asks. No site has answered or failed yet."""
        here = self.progress
        here.round, here.phase, here.phase_started = round_, phase, datetime.now(UTC)
        here.asked, here.answered, here.away, here.failed = sites, [], [], {}

    @_never_raises
    def reply_came(self, round_: int, phase: str, site: str) -> None:
        """Add a site to the sites that have answered, and remove it from the disconnected sites."""
        self.progress.answered.append(site)
        if site in self.progress.away:
            self.progress.away.remove(site)

    @_never_raises
    def sites_away(self, round_: int, phase: str, sites: list[str]) -> None:
        """Record the sites that are disconnected."""
        self.progress.away = sites

    @_never_raises
    def site_failed(self, round_: int, phase: str, site: str, reason: str) -> None:
        """Print that the phase continues without ``site``, and note this failure in the progress.

        In the progress, the site moves to the failed sites, with the reason in one line. A name
        that was not asked in this phase, such as "unknown", is only printed.
        """
        if site in self.progress.asked:
            self.progress.failed[site] = one_line(reason)
            if site in self.progress.answered:
                self.progress.answered.remove(site)
        self.say(f"round {round_}, {phase}: continuing without site {site}: {reason}")

    @_never_raises
    def round_ended(self, state: State) -> None:
        """Print one line about a finished round, and note the round in the progress.

        The line has these parts:

        - the mean training loss of this round over the sites that sent it,
        - the mean validation metrics of the model from before this round, because the new model is
          not measured yet. All sites with validation metrics must have sent the metric,
        - the method's remark about the round, if there is one,
        - the run's time left, estimated from the mean duration of this process's rounds.

        The means are not weighted.

        Args:
            state: the method's state after the round, which also has the round's number.
        """
        here, round_ = self.progress, state.round
        here.finished_rounds, here.phase, self.round_began = round_, "", time.monotonic()
        # ``began`` is the start of this process, so rounds before a resume do not count
        left = (self.round_began - self.began) / (round_ - self.first) * (here.rounds - round_)
        trained = self.recorder.values(round_, "train", trained=True).values()
        # A site may withhold its loss
        losses = [site["loss"] for site in trained if "loss" in site]
        before = self.recorder.values(round_ - 1, "val").values()
        parts = [f"round {round_:>{len(str(here.rounds))}}/{here.rounds}"]
        if losses:
            parts.append(f"train loss {fmean(losses):.3f}")
        for metric, text in self.measured:
            measured = [site[metric] for site in before if metric in site]
            # A mean over only some sites could not be compared with the rounds before
            if measured and len(measured) == len(before):
                parts.append(text.format(fmean(measured)))
        mark = self.marks(state).get(round_, "")
        if mark:
            parts.append(mark)
        parts.append(f"{clock(left)} left")
        self.say("  ".join(parts))

    def report(self, error: Exception) -> None:
        """Log the first error in showing or writing the progress, and ignore all later errors."""
        if not self.reported:
            self.reported = True
            reason = f"{type(error).__name__}: {one_line(error, 200)}"
            line = "fedsilo: %s cannot be kept up to date (%s); the run continues"
            logging.getLogger("flwr").warning(line, FILE, reason)

    @_never_raises
    def _end(self, state: Status, why: str = "") -> None:
        self.progress.state, self.progress.why, self.progress.phase = state, why, ""

    def _write_until_ended(self) -> None:
        """Write the progress files after each event, or after 15 s without one, until the run ends.

        The last write comes after the end of the run. Nothing is written if the run directory has
        been removed. After each write the thread pauses for 1 s or for 400 times the write's CPU
        time, whichever is longer. Several events during a pause lead to one write. Errors are
        passed to ``report``, and are not raised.
        """
        ended = False
        while not ended:
            self.due.wait(_STILL_HERE)
            self.due.clear()
            ended, began = self.ending.is_set(), time.thread_time()
            try:
                # Somebody may have removed the directory
                if self.directory.path.is_dir():
                    write_progress(self._build_snapshot(), self.directory.path)
            except Exception as error:  # a full disk, an unreadable /proc: the run continues
                self.report(error)
            # CPU time, not elapsed time: on a busy machine, writing is slow because it waits
            self.ending.wait(max(_PAUSE, _REST * (time.thread_time() - began)))

    def _build_snapshot(self) -> Progress:
        """Return a copy of the progress with the current times, memory and costs.

        The costs of a site are its seconds, bytes, peak memory and epsilon. ``left_out`` is the
        number of failures recorded so far. ``seconds_left`` is set only while the run is running
        and has finished a round in this process. It is the mean duration of these rounds times the
        number of unfinished rounds, minus the time since the current round began. It is at least 0.
        """
        # The copy is made under the lock; the rest takes time, and no event should wait for it
        with self.lock:
            here, sites = self.progress.model_copy(deep=True), list(self.sites)
        for site in sites:
            down, up, seconds = self.recorder.sites.get(site, (0, 0, 0.0))
            epsilon = None
            if self.privacy:
                epsilon = self.privacy.spent(site)
            here.sites[site] = SiteProgress(
                seconds=seconds,
                bytes_down=down,
                bytes_up=up,
                peak_memory_bytes=self.recorder.peak_memory.get(site, 0),
                epsilon=epsilon,
            )
        moment = time.monotonic()
        here.left_out = len(self.recorder.failures.entries)
        here.updated, here.seconds = datetime.now(UTC), round(moment - self.began, 3)
        here.server_memory_bytes = self.process.memory_info().rss
        done = here.finished_rounds - self.first
        if here.state == "running" and done > 0:
            # The estimate at the start of this round, minus the seconds since then
            a_round = (self.round_began - self.began) / done
            left = a_round * (here.rounds - here.finished_rounds) - (moment - self.round_began)
            here.seconds_left = round(max(0.0, left), 1)
        return here
