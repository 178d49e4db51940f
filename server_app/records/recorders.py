"""Hooks that write what happened: metrics.csv, traffic.csv, and the checks of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.contract.messages import (
    EVALUATE,
    INCOMING,
    PEAK_MEMORY,
    SECONDS,
    TRAINED,
    TRAINING,
    UNREPEATABLE,
    measurements,
)
from server_app.records.run_directory import RunDirectory, silos_document
from strategies.loop.hooks import Hook
from strategies.loop.participants import Participants
from strategies.loop.state import RoundState, SiteReply

METRICS_HEADER = ("round", "site", "split", "metric", "value")
TRAFFIC_HEADER = ("round", "phase", "site", "bytes_down", "bytes_up", "seconds")


class MetricsHook(Hook):
    """Collects tidy rows and writes metrics.csv after each round.

    A measurement of the incoming model describes the round before; one of the site's own trained
    model stands under ``trained-<metric>`` of the round it was trained in.
    """

    name = "metrics"

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.rows: list[list[Any]] = []

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, SiteReply]) -> None:
        """Take the measurements of training replies and of the final evaluation."""
        if phase not in (*TRAINING, EVALUATE):
            return
        described = round_ if phase == EVALUATE else round_ - 1
        for site, reply in replies.items():
            for model, split, metric, value in measurements(reply.metrics()):
                if model == INCOMING:
                    self.rows.append([described, site, split, metric, value])
                elif model == TRAINED:
                    self.rows.append([round_, site, split, f"trained-{metric}", value])

    def round_ended(self, state: RoundState) -> None:
        """Write the file."""
        rows = [[*row[:4], repr(row[4])] for row in sorted(self.rows, key=lambda row: row[:4])]
        self.directory.write_csv("metrics.csv", METRICS_HEADER, rows)

    def run_ended(self, state: RoundState) -> None:
        """Write the file, now with the final evaluation."""
        self.round_ended(state)

    def state(self) -> Any:
        """Return the rows."""
        return self.rows

    def restore(self, state: Any) -> None:
        """Take the rows back."""
        self.rows = state

    def values(self, round_: int, split: str) -> dict[str, dict[str, float]]:
        """Return the global model's measurements after ``round_``: site -> metric -> value."""
        by_site: dict[str, dict[str, float]] = {}
        for row_round, site, row_split, metric, value in self.rows:
            if row_round == round_ and row_split == split and not metric.startswith("trained-"):
                by_site.setdefault(site, {})[metric] = value
        return {site: by_site[site] for site in sorted(by_site)}


class TrafficHook(Hook):
    """Collects bytes and seconds per phase and site and writes traffic.csv after each round."""

    name = "traffic"

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.rows: list[list[Any]] = []
        self.peak_memory: dict[str, int] = {}
        self.unrepeatable: set[str] = set()

    def run_started(self, state: RoundState, participants: Participants, total_rounds: int) -> None:
        """Take what asking the sites for their names weighed."""
        for site, (down, up) in participants.traffic.items():
            self.rows.append([state.round, "hello", site, down, up, 0.0])

    def participants_changed(
        self, round_: int, participants: Participants, joined: list[str]
    ) -> None:
        """Take what asking the new ones weighed, and write silos.json anew."""
        for site in joined:
            self.rows.append([round_ - 1, "hello", site, *participants.traffic[site], 0.0])
        self.directory.write_json("silos.json", silos_document(participants))

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, SiteReply]) -> None:
        """Take what each reply weighed and cost."""
        for site, reply in replies.items():
            self.rows.append(
                [
                    round_,
                    phase,
                    site,
                    reply.bytes_down,
                    reply.bytes_up,
                    round(reply.metric(SECONDS), 3),
                ]
            )
            peak = int(reply.metric(PEAK_MEMORY))
            self.peak_memory[site] = max(peak, self.peak_memory.get(site, 0))
            named = (name for name in reply.metrics() if name.startswith(UNREPEATABLE))
            self.unrepeatable |= {name.removeprefix(UNREPEATABLE) for name in named}

    def round_ended(self, state: RoundState) -> None:
        """Write the file."""
        self.directory.write_csv("traffic.csv", TRAFFIC_HEADER, self.rows)

    def run_ended(self, state: RoundState) -> None:
        """Write the file, now with the final evaluation."""
        self.round_ended(state)

    def state(self) -> Any:
        """Return the rows, the peaks, and the operations that were not deterministic."""
        return [self.rows, self.peak_memory, sorted(self.unrepeatable)]

    def restore(self, state: Any) -> None:
        """Take them back."""
        self.rows, self.peak_memory, *named = state  # older checkpoints name none
        self.unrepeatable = set(*named)

    def totals(self) -> dict[str, int]:
        """Return all bytes, down to the sites and up from them."""
        return {"down": sum(row[3] for row in self.rows), "up": sum(row[4] for row in self.rows)}

    def seconds(self) -> dict[str, float]:
        """Return the seconds that each site has worked."""
        by_site: dict[str, float] = {}
        for row in self.rows:
            by_site[row[2]] = round(by_site.get(row[2], 0.0) + row[5], 3)
        return by_site


class FailureHook(Hook):
    """Remembers which sites the run went on without, for summary.json."""

    name = "failures"

    def __init__(self) -> None:
        self.failures: list[dict[str, Any]] = []

    def run_started(self, state: RoundState, participants: Participants, total_rounds: int) -> None:
        """Take note of who was left out before the run."""
        for reason in participants.refused:
            self.site_failed(state.round, "hello", "unknown", reason)

    def site_failed(self, round_: int, phase: str, site: str, reason: str) -> None:
        """Take note."""
        self.failures.append({"round": round_, "phase": phase, "site": site, "reason": reason})

    def state(self) -> Any:
        """Return the failures."""
        return self.failures

    def restore(self, state: Any) -> None:
        """Take them back."""
        self.failures = state
