"""What one sees while a run goes on: bars per round and site, and a line per round."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from rich.console import Console

from fedsilo.models.contract.messages import EVALUATE, TRAINED, TRAINING, measurement
from fedsilo.server_app.records.many_sites import listed
from fedsilo.server_app.records.recorders import MetricsHook
from fedsilo.server_app.run.progress_bars import choose_bars
from fedsilo.server_app.run.watched import clock
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.state import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply

_LOSS = measurement(TRAINED, "train", "loss")  # which a site may withhold


class ProgressHook(Hook):
    """Bars where they can be drawn, and everywhere a line per round with the time left.

    A round's line gives the mean over sites of the newest validation measurements known, which
    are those of the model that the round began with.
    """

    def __init__(
        self, metrics: MetricsHook, console: Console, method: type[Method], title: str
    ) -> None:
        self.metrics = metrics
        self.console = console
        self.method = method
        self.title = title
        self.bars = choose_bars(console)
        self.total = 0
        self.first = 0
        self.started = 0.0
        self.loss: dict[str, float] = {}

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        """Say what starts, and show the bars."""
        self.total, self.first, self.started = total_rounds, state.round, time.monotonic()
        sites = participants.sites()
        self._say(f"{self.title}: {len(sites)} sites ({listed(sites)}), {total_rounds} rounds")
        if state.round:
            self._say(f"going on after round {state.round}")
        self.bars.begin(total_rounds, state.round)

    def phase_started(self, round_: int, phase: str, sites: list[str]) -> None:
        """Begin the bar of the sites."""
        self.bars.phase(round_, phase, len(sites))

    def reply_came(self, round_: int, phase: str, site: str) -> None:
        """Move the bar of the sites."""
        self.bars.reply(round_, phase, site)

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Keep the training losses for the round's line."""
        if phase in TRAINING:
            told = {site: reply.metrics.get(_LOSS) for site, reply in replies.items()}
            self.loss = {site: loss for site, loss in told.items() if loss is not None}
        if phase == EVALUATE:
            self.close()

    def participants_changed(
        self, round_: int, participants: Participants, joined: list[str]
    ) -> None:
        """Say who has come."""
        self._say(f"round {round_}: {listed(joined)} joined")

    def site_failed(self, round_: int, phase: str, site: str, reason: str) -> None:
        """Say which site is left out, and why."""
        self._say(f"round {round_}, {phase}: going on without site {site}: {reason}")

    def round_ended(self, state: State) -> None:
        """Print the round's line and move its bar."""
        done = state.round - self.first
        left = (time.monotonic() - self.started) / done * (self.total - state.round)
        parts = [
            f"round {state.round:>{len(str(self.total))}}/{self.total}",
            *([f"train loss {_mean(self.loss.values()):.3f}"] if self.loss else []),
            *self._incoming(state.round - 1),
        ]
        if mark := self.method.marks(state).get(state.round):
            parts.append(mark)
        self._say("  ".join([*parts, f"{clock(left)} left"]))
        self.bars.round_done(state.round)

    def close(self) -> None:
        """Take the bars away, whatever happened."""
        self.bars.stop()

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _incoming(self, round_: int) -> list[str]:
        values = self.metrics.values(round_, "val").values()
        shown = (
            ("accuracy", "began at val accuracy {:.3f}"),
            ("entropy", "entropy {:.3f}"),
            ("perplexity", "perplexity {:.1f}"),
        )
        return [
            text.format(_mean([site[metric] for site in values]))
            for metric, text in shown
            if values and all(metric in site for site in values)
        ]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else float("nan")
