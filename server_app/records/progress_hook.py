"""The hook that keeps ``progress.json`` and ``progress.prom`` up to date while a run goes on.

It looks on and nothing more: files are written by a thread of its own, once a second at most, and
whatever fails in it is told once and never reaches the run.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Any, Concatenate, ParamSpec

import psutil

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.messages import EVALUATE, PEAK_MEMORY, SECONDS
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.server_app.records.privacy_account import PrivacyHook
from fedsilo.server_app.records.progress import (
    FAILED,
    FILE,
    FINISHED,
    INTERRUPTED,
    METRICS_FILE,
    RUNNING,
    Progress,
    SiteProgress,
    metrics_text,
    now,
)
from fedsilo.server_app.records.recorders import TrafficHook
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.state import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply

_PAUSE = 1.0  # seconds from one writing to the next, at least
_REST = 400.0  # and this many times what a writing took: it costs a 400th of a core at most
_METRICS_PAUSE = 5.0  # seconds between writings of the metrics, which are fetched more rarely
_STILL_HERE = 15.0  # seconds after which the file is written though nothing has happened
_PATIENCE = 5.0  # seconds for the thread to end
P = ParamSpec("P")


def _harmless(
    note: Callable[Concatenate[ProgressRecord, P], None],
) -> Callable[Concatenate[ProgressRecord, P], None]:
    """Return a hook's method that takes note and cannot fail."""

    @functools.wraps(note)
    def noted(self: ProgressRecord, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with self.lock:
                note(self, *args, **kwargs)
            self.due.set()
        except Exception as error:  # whatever it is, the run is none of its business
            self.tell(error)

    return noted


class ProgressRecord(Hook):
    """Writes how far the run is, for ``fedsilo watch`` and for alarms.

    Args:
        directory: the run's.
        common: the run's settings.
        title: says what runs.
        traffic: knows the bytes of before a resumption.
        privacy: knows what has been spent.
    """

    def __init__(
        self,
        directory: RunDirectory,
        common: CommonSettings,
        title: str,
        traffic: TrafficHook,
        privacy: PrivacyHook,
    ) -> None:
        self.process, self.measured = psutil.Process(), float("-inf")
        self.directory, self.traffic, self.privacy = directory, traffic, privacy
        self.lock, self.due, self.ending = Lock(), Event(), Event()
        self.told = False
        self.began, self.round_began, self.first = time.monotonic(), time.monotonic(), 0
        self.progress = Progress(
            run=directory.path.name,
            title=title,
            method=common.method,
            dataset=common.dataset,
            seed=common.seed,
            rounds=common.rounds,
            pid=os.getpid(),
            process_started=self.process.create_time(),
            started=now(),
            updated=now(),
            max_epsilon=common.max_epsilon,
        )

    @contextmanager
    def following(self) -> Iterator[None]:
        """Keep the files up to date in the block, and write how it ended."""
        thread = Thread(target=self._keep_written, name="progress", daemon=True)
        thread.start()
        try:
            yield
            self._end(FINISHED)
        except Exception as error:
            self._end(FAILED, one_line(error))
            raise
        except BaseException:
            self._end(INTERRUPTED)
            raise
        finally:
            self.ending.set()
            self.due.set()
            thread.join(_PATIENCE)

    @_harmless
    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        """Take who takes part, and what the run has cost before it was resumed."""
        self.first = state.round
        self.progress.rounds, self.progress.finished_rounds = total_rounds, state.round
        self._take(participants)
        for site, (down, up, seconds) in self.traffic.sites.items():
            said = self._site(site)
            said.bytes_down, said.bytes_up = said.bytes_down + down, said.bytes_up + up
            said.seconds = seconds
            said.peak_memory_bytes = self.traffic.peak_memory.get(site, 0)

    @_harmless
    def participants_changed(
        self, round_: int, participants: Participants, joined: list[str]
    ) -> None:
        """Take who has come."""
        self._take(participants)
        for site in joined:
            said, (down, up) = self._site(site), participants.traffic[site]
            said.bytes_down, said.bytes_up = said.bytes_down + down, said.bytes_up + up

    @_harmless
    def phase_started(self, round_: int, phase: str, sites: list[str]) -> None:
        """Take who is asked."""
        here = self.progress
        here.round, here.phase, here.phase_started = round_, phase, now()
        here.asked, here.answered, here.away, here.failed = list(sites), [], [], {}

    @_harmless
    def reply_came(self, round_: int, phase: str, site: str) -> None:
        """Take who has answered."""
        self.progress.answered.append(site)
        self.progress.away = [other for other in self.progress.away if other != site]

    @_harmless
    def sites_away(self, round_: int, phase: str, sites: list[str]) -> None:
        """Take who is disconnected."""
        self.progress.away = list(sites)

    @_harmless
    def site_failed(self, round_: int, phase: str, site: str, reason: str) -> None:
        """Take whom the run goes on without."""
        self.progress.left_out += 1
        if site in self.progress.asked:
            self.progress.failed[site] = one_line(reason)
            self.progress.answered = [s for s in self.progress.answered if s != site]

    @_harmless
    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Take what the replies have cost."""
        for site, reply in replies.items():
            said = self._site(site)
            said.bytes_down += reply.bytes_down
            said.bytes_up += reply.bytes_up
            said.seconds = round(said.seconds + reply.metrics[SECONDS], 3)
            said.peak_memory_bytes = max(said.peak_memory_bytes, int(reply.metrics[PEAK_MEMORY]))
            said.epsilon = self.privacy.spent(site)
        if phase == EVALUATE:
            self.progress.phase = ""

    @_harmless
    def round_ended(self, state: State) -> None:
        """Take that a round is over."""
        self.progress.finished_rounds, self.progress.phase = state.round, ""
        self.round_began = time.monotonic()

    def tell(self, error: Exception) -> None:
        """Say, once, that the run cannot be watched."""
        if not self.told:
            self.told = True
            logging.getLogger("flwr").warning(
                "fedsilo: %s cannot be kept up to date (%s: %s); the run goes on",
                FILE,
                type(error).__name__,
                one_line(error, 200),
            )

    @_harmless
    def _end(self, state: Any, why: str = "") -> None:
        self.progress.state, self.progress.why = state, why
        self.progress.phase = ""

    def _take(self, participants: Participants) -> None:
        for site in participants.sites():
            self._site(site).epsilon = self.privacy.spent(site)

    def _site(self, site: str) -> SiteProgress:
        return self.progress.sites.setdefault(site, SiteProgress())

    def _keep_written(self) -> None:
        """Write when something has happened, until the block has ended; then once more."""
        while not self.ending.is_set():
            self.due.wait(_STILL_HERE)
            self.due.clear()
            began = time.thread_time()
            self._write()
            self.ending.wait(max(_PAUSE, _REST * (time.thread_time() - began)))
        self._write()

    def _write(self) -> None:
        try:
            with self.lock:
                progress = self.progress.model_copy(deep=True)
            self._tell_time(progress)
            if not self.directory.path.is_dir():
                return  # somebody has removed it
            texts = {FILE: progress.document()}
            if self.ending.is_set() or time.monotonic() - self.measured > _METRICS_PAUSE:
                texts[METRICS_FILE], self.measured = metrics_text(progress), time.monotonic()
            for name, text in texts.items():
                write_atomically(self.directory.path / name, text, lasting=False)
        except Exception as error:  # a full disk, an unreadable /proc: the run goes on
            self.tell(error)

    def _tell_time(self, progress: Progress) -> None:
        moment, running = time.monotonic(), progress.state == RUNNING
        progress.updated, progress.seconds = now(), round(moment - self.began, 3)
        progress.server_memory_bytes = self.process.memory_info().rss
        done = progress.finished_rounds - self.first
        if running and done > 0:
            a_round = (self.round_began - self.began) / done
            left = a_round * (progress.rounds - progress.finished_rounds)
            progress.seconds_left = round(max(0.0, left - (moment - self.round_began)), 1)
