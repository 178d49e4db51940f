"""Hooks that write what happened: metrics.csv, traffic.csv, and the checks of a method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedsilo.models.contract.messages import (
    EVALUATE,
    INCOMING,
    PEAK_MEMORY,
    SECONDS,
    TRAINED,
    TRAINING,
    UNREPEATABLE,
    measurements,
)
from fedsilo.server_app.records.growing_csv import GrowingCsv
from fedsilo.server_app.records.run_directory import RunDirectory, silos_document
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.state import State
from fedsilo.strategies.loop.update_statistics import UpdateStatistics
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply

METRICS_HEADER = ("round", "site", "split", "metric", "value")
TRAFFIC_HEADER = ("round", "phase", "site", "bytes_down", "bytes_up", "seconds")
UPDATE = "update"  # in place of a split: figures of what a site's reply changes

Row = list[Any]


class RowsHook(Hook):
    """Rows of a table that grows with the run.

    Attributes:
        table: the file.
        rows: those that may still change there, or are not there yet.
        untold: those that ``taken`` has not told yet.
    """

    def __init__(self, table: GrowingCsv) -> None:
        self.table = table
        self.rows: list[Row] = []
        self.untold: list[Row] = []

    def take(self, row: Row) -> None:
        """Take a row that is new."""
        self.rows.append(row)
        self.untold.append(row)

    def known(self) -> Iterator[Row]:
        """Yield all rows so far."""
        yield from self.table.rows()
        yield from self.rows

    def taken(self) -> list[Row]:
        """Return the rows that have come since this was last asked."""
        taken, self.untold = self.untold, []
        return taken


class MetricsHook(RowsHook):
    """Collects tidy rows and writes metrics.csv after each round; held are those of two rounds.

    A measurement of the incoming model describes the round before; one of the site's own trained
    model stands under ``trained-<metric>`` of the round it was trained in.
    """

    name = "metrics"

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(GrowingCsv(directory.path / "metrics.csv", METRICS_HEADER))
        self.last: list[Row] = []  # of the round before those of which more may come

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Take the measurements of training replies and of the final evaluation."""
        if phase not in (*TRAINING, EVALUATE):
            return
        described = round_ if phase == EVALUATE else round_ - 1
        for site, reply in replies.items():
            for model, split, metric, value in measurements(reply.metrics):
                if model == INCOMING:
                    self.take([described, site, split, metric, value])
                elif model == TRAINED:
                    self.take([round_, site, split, f"trained-{metric}", value])

    def updates_measured(
        self, round_: int, phase: str, contributions: Mapping[str, UpdateStatistics]
    ) -> None:
        """Take the norms of updates, and their cosines to what the model became."""
        for site, part in contributions.items():
            self.take([round_, site, UPDATE, "norm", part.norm])
            if part.cosine is not None:
                self.take([round_, site, UPDATE, "cosine", part.cosine])

    def round_ended(self, state: State) -> None:
        """Write what is new; of rounds before ``state.round`` nothing more comes."""
        ordered = sorted(self.rows, key=lambda row: row[:4])
        settled = [row for row in ordered if row[0] < state.round]
        self.rows = ordered[len(settled) :]
        self.last = [row for row in [*self.last, *settled] if row[0] == state.round - 1]
        self.table.write(map(_written, settled), map(_written, self.rows))

    def run_ended(self, state: State) -> None:
        """Write the file, now with the final evaluation."""
        self.round_ended(state)

    def state(self) -> Any:
        """Return the rows of which the file may still change, and where they stand."""
        return {"table": self.table.state(), "rows": self.rows, "last": self.last}

    def restore(self, state: Any) -> None:
        """Take the rows back; older checkpoints hold all of them."""
        if isinstance(state, list):
            self.rows = state
            return
        self.table.restore(state["table"])
        self.rows, self.last = state["rows"], state["last"]

    def values(self, round_: int, split: str) -> dict[str, dict[str, float]]:
        """Return the global model's measurements: site -> metric -> value.

        ``round_`` is that after which they were taken, the last one or the one before it.
        """
        by_site: dict[str, dict[str, float]] = {}
        for row_round, site, row_split, metric, value in [*self.last, *self.rows]:
            if row_round == round_ and row_split == split and not metric.startswith("trained-"):
                by_site.setdefault(site, {})[metric] = value
        return {site: by_site[site] for site in sorted(by_site)}


def _written(row: Row) -> Row:
    """Return a row of metrics with all digits of its figure."""
    return [*row[:4], repr(row[4])]


class TrafficHook(RowsHook):
    """Collects bytes and seconds per phase and site and writes traffic.csv after each round.

    Attributes:
        sites: bytes down, bytes up and seconds of each site so far.
    """

    name = "traffic"

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(GrowingCsv(directory.path / "traffic.csv", TRAFFIC_HEADER))
        self.directory = directory
        self.sites: dict[str, tuple[int, int, float]] = {}
        self.peak_memory: dict[str, int] = {}
        self.unrepeatable: set[str] = set()

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        """Take what asking the sites for their names weighed."""
        for site, (down, up) in participants.traffic.items():
            self.take([state.round, "hello", site, down, up, 0.0])

    def participants_changed(
        self, round_: int, participants: Participants, joined: list[str]
    ) -> None:
        """Take what asking the new ones weighed, and write silos.json anew."""
        for site in joined:
            self.take([round_ - 1, "hello", site, *participants.traffic[site], 0.0])
        self.directory.write_json("silos.json", silos_document(participants))

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Take what each reply weighed and cost."""
        for site, reply in replies.items():
            seconds = round(reply.metrics[SECONDS], 3)
            self.take([round_, phase, site, reply.bytes_down, reply.bytes_up, seconds])
            peak = int(reply.metrics[PEAK_MEMORY])
            self.peak_memory[site] = max(peak, self.peak_memory.get(site, 0))
            named = (name for name in reply.metrics if name.startswith(UNREPEATABLE))
            self.unrepeatable |= {name.removeprefix(UNREPEATABLE) for name in named}

    def round_ended(self, state: State) -> None:
        """Write what is new."""
        self.table.write(self.rows)
        self.rows = []

    def run_ended(self, state: State) -> None:
        """Write the file, now with the final evaluation."""
        self.round_ended(state)

    def state(self) -> Any:
        """Return where the file stands, the sums, and the operations not deterministic."""
        return {
            "table": self.table.state(),
            "rows": self.rows,
            "sites": self.sites,
            "peak-memory": self.peak_memory,
            "unrepeatable": sorted(self.unrepeatable),
        }

    def restore(self, state: Any) -> None:
        """Take them back; older checkpoints hold all rows, and some name no operations."""
        if isinstance(state, list):
            rows, self.peak_memory, *named = state
            self.unrepeatable = set(*named)
            for row in rows:
                self.take(row)
            self.untold = []
            return
        self.table.restore(state["table"])
        self.rows, self.peak_memory = state["rows"], state["peak-memory"]
        self.unrepeatable = set(state["unrepeatable"])
        self.sites = {site: (down, up, took) for site, (down, up, took) in state["sites"].items()}

    def totals(self) -> dict[str, int]:
        """Return all bytes, down to the sites and up from them."""
        down, up = ([cost[part] for cost in self.sites.values()] for part in (0, 1))
        return {"down": int(sum(down)), "up": int(sum(up))}

    def seconds(self) -> dict[str, float]:
        """Return the seconds that each site has worked."""
        return {site: seconds for site, (_, _, seconds) in self.sites.items()}

    def take(self, row: Row) -> None:
        """Take a row that is new, and add it to its site's sums."""
        super().take(row)
        down, up, seconds = self.sites.get(row[2], (0, 0, 0.0))
        self.sites[row[2]] = (down + row[3], up + row[4], round(seconds + row[5], 3))


class FailureHook(Hook):
    """Remembers which sites the run went on without, for summary.json."""

    name = "failures"

    def __init__(self) -> None:
        self.failures: list[dict[str, Any]] = []

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
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
