"""A hospital's record of its answers: the messages, rounds and seconds of each run.

A run is identified by its name, which a server chooses. A run that has advanced cannot start again
under the same name, so no run can erase another's state, and the same round is answered only a few
times.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from fedsilo.client_app.site.limits import Limits
from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.core.errors import RefusedError
from fedsilo.core.messages import ROUND_KEYS, Instruction
from fedsilo.core.one_line import quote_value

_PHASE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KNOWN_RUNS = 1000
_DAY = 86400.0  # seconds


@dataclass
class RunRecord:
    """The number of messages, the highest round and the working time of one run."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    began: NonNegativeFloat  # the time of its first message, in seconds since 1970
    messages: NonNegativeInt = 0  # the number of answers so far, including failed ones
    seconds: NonNegativeFloat = 0.0  # the working time
    round: NonNegativeInt = 0  # the highest round that was asked for
    # The number of requests for each phase of the last two rounds, by ``<round>-<phase>``
    asked: dict[Annotated[str, Field(pattern=r"^\d+-[\w-]+$")], NonNegativeInt] = field(
        default_factory=dict
    )

    def refuse(self, message: Instruction, rounds: int, limits: Limits) -> None:
        """Check that a message fits the history of its run, and the hospital's quotas.

        The message is not counted here. If there are several reasons to refuse it, the error gives
        the first one.

        Args:
            message: the server's request.
            rounds: the number of rounds in the run's settings. The final evaluation is the round
                after the last one.
            limits: the hospital's quotas.

        Raises:
            RefusedError: the message has an impossible round, step or phase name, or a round more
                than one before the run's highest. The error also means that a quota is used up:
                'max-repeats' for this phase and round, or the run's 'max-messages' or
                'max-seconds'.
        """
        reason = next(self._reasons_against(message, rounds, limits), "")
        if reason:
            raise RefusedError(reason)

    def _reasons_against(self, message: Instruction, rounds: int, limits: Limits) -> Iterator[str]:
        """Yield a sentence for each reason to refuse a message; the server gets only the first one.

        The reasons are, in this order:

        - The phase's name is not 1 to 64 letters, digits, '-' or '_'. The round must also be from 1
          to ``rounds`` + 1, and the step from 0 to 999,999.
        - The round is more than one before the highest round of the run so far.
        - The phase was already asked for 'max-repeats' times in this round.
        - The run has used up its messages ('max-messages').
        - The run has used up its seconds of work ('max-seconds').

        ``rounds`` is the number of rounds in the run's settings. Round ``rounds`` + 1 is the final
        evaluation.
        """
        name, round_, step = message.run_name, message.round, message.step
        named = _PHASE.fullmatch(message.phase)
        if not named or not 1 <= round_ <= rounds + 1 or not 0 <= step < ROUND_KEYS:
            yield (
                f"{quote_value(message.phase)} of round {round_}, step {step} is asked for: run "
                f"'{name}' has {rounds} rounds, and phases have plain names"
            )
        if round_ < self.round - 1:
            yield (
                f"run '{name}' asks for round {round_}, but was in round {self.round} here: rounds "
                "only go up; resume it from its newest checkpoint, or choose another 'run.name'"
            )
        if self.asked.get(_key(message), 0) >= limits.max_repeats:
            yield (
                f"run '{name}' has had '{message.phase}' of round {round_} answered "
                f"{limits.max_repeats} times ('max-repeats'): go on, or choose another 'run.name'"
            )
        if self.messages >= limits.max_messages:
            yield (
                f"run '{name}' has had {self.messages} messages answered, all that the hospital "
                "gives a run ('max-messages')"
            )
        if self.seconds >= limits.max_seconds:
            yield (
                f"run '{name}' has taken all the seconds that the hospital gives a run "
                "('max-seconds')"
            )

    def enter(self, message: Instruction) -> None:
        """Count a message in the record of its run, in total and by round and phase.

        The record's ``round`` becomes the highest round asked for so far. Counts by phase are kept
        only for this highest round and the one before it. The caller checks the message first, and
        writes the record to the disk afterwards.
        """
        self.messages += 1
        self.round = max(self.round, message.round)
        self.asked[_key(message)] = self.asked.get(_key(message), 0) + 1
        last = (self.round, self.round - 1)
        for key in list(self.asked):
            if int(key.partition("-")[0]) not in last:
                del self.asked[key]


class RunBook:
    """The stored record of one site's answers; a change is on the disk before work begins."""

    def __init__(self, folder: Path) -> None:
        self.file: OwnFile[dict[str, RunRecord]] = OwnFile(
            folder / "runs.json",
            dict[str, RunRecord],
            "the hospital's run book runs.json",
            "bring it back; nothing else records what was answered in each run",
        )

    def enter(self, message: Instruction, rounds: int, limits: Limits) -> float:
        """Check a message, count it in its run, and return the seconds of work left for the run.

        A refused message is not counted. The first message of an unknown run begins that run.

        Args:
            message: the server's request.
            rounds: the number of rounds in the run's settings.
            limits: the hospital's quotas.

        Raises:
            RefusedError: the message does not fit the run's history, or a quota is used up. The
                quota 'max-runs-per-day' limits the runs that begin within 24 hours.
            CheckpointError: the record is damaged, or cannot be written.
        """
        with self._change_runs() as runs:
            if message.run_name not in runs:
                self._refuse_many(runs, limits)
            record = runs.setdefault(message.run_name, RunRecord(time.time()))
            record.refuse(message, rounds, limits)
            record.enter(message)
            # Reinserted, so that the newest is last
            runs[message.run_name] = runs.pop(message.run_name)
            return limits.max_seconds - record.seconds

    def add_seconds(self, run_name: str, seconds: float) -> None:
        """Add the working time of a message to the total of its run.

        If the run is no longer in the record, nothing is added.

        Raises:
            CheckpointError: the record is damaged, or cannot be written.
        """
        with self._change_runs() as runs:
            # A thousand other runs may have begun since, and then this one was dropped
            if run_name in runs:
                runs[run_name].seconds += seconds

    def count_hello(self, limits: Limits) -> None:
        """Count a hello or a survey against the daily quota that both kinds of message share.

        A hello asks a site who it is, and a survey asks for statistics of its data. The quota is 3
        * 'max-runs-per-day' + 10. A day begins with its first such message and lasts 24 hours.

        Raises:
            RefusedError: the quota is used up.
            CheckpointError: the record is damaged, or cannot be written.
        """
        most = 3 * limits.max_runs_per_day + 10
        with self._change_runs() as runs:
            day = runs.setdefault("", RunRecord(time.time()))
            if not _is_of_today(day):
                day = runs[""] = RunRecord(time.time())
            if day.messages >= most:
                raise RefusedError(
                    f"the site has said {most} times in 24 hours who it is, or what its data are "
                    "('max-runs-per-day'): ask again tomorrow"
                )
            day.messages += 1

    def _refuse_many(self, runs: Mapping[str, RunRecord], limits: Limits) -> None:
        """Check that the hospital's quota of runs within 24 hours allows a new run to begin.

        Messages before a run, such as a survey of the site's data, do not count as a run.

        Raises:
            RefusedError: 'max-runs-per-day' or more runs have begun in the last 24 hours.
        """
        # The entry with the empty name counts hellos and surveys, not a run
        today = [name for name, run in runs.items() if name and _is_of_today(run)]
        if len(today) >= limits.max_runs_per_day:
            raise RefusedError(
                f"{len(today)} runs have begun here in 24 hours, all that the hospital allows "
                "('max-runs-per-day'): ask again tomorrow"
            )

    @contextmanager
    def _change_runs(self) -> Iterator[dict[str, RunRecord]]:
        """Yield the records of all runs by name, and store the changed records after the block.

        The record with the empty name is no run. It counts the messages that come before a run.
        Concurrent messages wait for each other. Only the 1,000 most recently used runs are stored.
        If the block raises an error, nothing is written.

        Raises:
            CheckpointError: the file is damaged, or cannot be written.
        """
        with self.file.lock():
            runs = self.file.read({})
            yield runs
            # The order of use decides, because the clock may have been wrong at 'began'
            names = [name for name in runs if name]  # the empty name counts hellos
            for name in names[:-_KNOWN_RUNS]:
                del runs[name]
            self.file.write(runs)


def _is_of_today(run: RunRecord) -> bool:
    """Tell whether a run began within the last 24 hours.

    A start in the future comes from a wrong clock, and the result is False. Otherwise the run would
    count against the daily quota of runs until the clock reaches that time.
    """
    return 0 <= time.time() - run.began < _DAY


def _key(message: Instruction) -> str:
    return f"{message.round}-{message.phase.replace('_', '-')}"
