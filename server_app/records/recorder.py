"""The hook that writes metrics.csv and traffic.csv.

The files grow with each round, so a late round costs no more than an early one. Rows are either
final or open. Final rows never change. Open rows follow them, and are overwritten by the next call.
A checkpoint holds the size of the final rows in bytes and their CRC-32, and a resumed run continues
after those bytes.
"""

import csv
import io
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from fedsilo.core import messages
from fedsilo.core.errors import CheckpointError, RunDirectoryError
from fedsilo.core.files.atomic_files import FULL, write_atomically
from fedsilo.core.metric_names import TRAINED_PREFIX, UPDATE, read_measurement
from fedsilo.server_app.records.failures import FailureLog
from fedsilo.server_app.records.run_directory import SILOS, RunDirectory, silos_document
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.plausible import UpdateStatistics
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply

Row = Sequence[Any]


class GrowingCsv:
    """A CSV file that grows with the run: final rows, then open rows that may still change.

    Attributes:
        path: the file.
        header: the names of the columns.
        final: the number of ``bytes`` up to the last final row, header included, and their
            ``crc32``; 0 bytes before the first call of ``write``.
    """

    def __init__(self, path: Path, header: Row) -> None:
        self.path = path
        self.header = header
        self.final = {"bytes": 0, "crc32": 0}

    def write(self, final: Sequence[Row], still_open: Sequence[Row] = ()) -> None:
        """Append ``final`` rows, then ``still_open`` rows, after the final rows of earlier calls.

        The open rows of the previous call are overwritten. The first call replaces an existing
        file, and writes the header first. A row is cut to the number of the header's columns.
        Afterwards, the attribute ``final`` has the number of bytes up to the last final row, and
        the CRC-32 of these bytes.

        Args:
            final: rows that will not change after this call.
            still_open: rows that the next call overwrites.

        Raises:
            RunDirectoryError: the file is gone, shorter than before, or cannot be written.
            OSError: the disk is full. The caller can then explain how to go on.
        """
        text, size = io.StringIO(), self.final["bytes"]
        writer = csv.writer(text, lineterminator="\n")
        # A file of an earlier version may have fewer columns
        width = len(self.header)
        if not size:
            writer.writerow(self.header)
        for row in final:
            writer.writerow(row[:width])
        added = text.getvalue().encode()
        for row in still_open:
            writer.writerow(row[:width])
        lines = text.getvalue().encode()
        # The first writing replaces a file of an earlier attempt. Later ones do not rewrite the
        # whole file: what they cut off after a crash lies behind the final bytes
        try:
            if not size:
                write_atomically(self.path, lines)
            else:
                with self.path.open("r+b") as file:
                    if file.seek(0, os.SEEK_END) < size:
                        raise OSError(None, "it is shorter than it was")
                    file.seek(size)
                    file.write(lines)
                    file.truncate()
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            # ``only_writer`` catches this error and says how to go on
            if error.errno in FULL:
                error.filename = str(self.path)
                raise
            raise RunDirectoryError(
                f"cannot append to {self.path} ({error.strerror}): resume the run once the file "
                "can be written, or start a new run"
            ) from None
        # Continued over the new bytes only, so that a late round costs no more than an early one
        crc32 = zlib.crc32(added, self.final["crc32"])
        self.final = {"bytes": size + len(added), "crc32": crc32}

    def rows(self) -> Iterator[list[str]]:
        """Yield the file's final rows (those that will not change any more), as lists of strings.

        The rows are in the order of the file, without the header and without the open rows at the
        end. Before the first call of ``write`` there are no rows. All final rows are read into
        memory together.
        """
        if self.final["bytes"]:
            with self.path.open("rb") as file:
                text = io.StringIO(file.read(self.final["bytes"]).decode(), newline="")
            reader = csv.reader(text)
            next(reader)
            yield from reader

    def restore(self, final: dict[str, int]) -> None:
        """Continue the file after the final rows that a checkpoint has recorded.

        The next call of ``write`` overwrites everything after these rows. If there are final rows,
        the file's header decides the columns, because an earlier version of fedsilo may have
        written fewer columns.

        Args:
            final: the number of ``bytes`` up to the last final row, and their ``crc32``. With 0
                bytes, the file begins anew.

        Raises:
            CheckpointError: the file does not begin with those bytes.
        """
        size, data = final["bytes"], b""
        with suppress(OSError):
            data = self.path.read_bytes()[:size]
        if len(data) < size or zlib.crc32(data) != final["crc32"]:
            raise CheckpointError(
                f"{self.path} was altered: its first {size} bytes are not those of the checkpoint; "
                "restore the file, or start a new run"
            )
        # An earlier version may have begun the file with fewer columns
        if size:
            self.header = data.partition(b"\n")[0].decode().split(",")
        self.final = {"bytes": size, "crc32": final["crc32"]}


METRICS_HEADER = ("round", "site", "split", "metric", "value")
TRAFFIC_HEADER = (
    *("round", "phase", "site", "bytes_down", "bytes_up", "seconds"),
    *("steps", "samples"),  # optimiser steps and samples of local training; 0 if not reported
)
ALL = "all"  # a row of all sites: the mean over all samples; no site can have this name
_ORDER = itemgetter(0, 1, 2, 3)  # metrics.csv is sorted by round, site, split and metric


class Recorder(Hook):
    """Writes one row per metric and per message after each round.

    A metric of the incoming model belongs to the round before. A metric of the site's own trained
    model is named ``trained-<metric>``, and belongs to the round in which the model was trained. So
    the rows of a round are complete, and their position in metrics.csv is final, one round later.

    Attributes:
        written: the rows of metrics.csv and of traffic.csv that the last round added.
        open: rows of metrics.csv that are written, but may still change their position.
        last: the rows of the newest final round.
        sites: bytes down, bytes up and seconds so far, by site.
        peak_memory: peak memory in bytes, by site.
        unrepeatable: names of non-deterministic operations that ran.
        failures: the messages without a usable reply, which are also in ``failures.jsonl``.
    """

    name = "records"

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.metrics = GrowingCsv(directory.path / "metrics.csv", METRICS_HEADER)
        self.traffic = GrowingCsv(directory.path / "traffic.csv", TRAFFIC_HEADER)
        self.written: tuple[list[Row], list[Row]] = ([], [])
        self.open: list[Row] = []
        self.last: list[Row] = []
        self.sites: dict[str, tuple[int, int, float]] = {}
        self.peak_memory: dict[str, int] = {}
        self.unrepeatable: set[str] = set()
        self.failures = FailureLog(directory)
        self._new_metrics: list[Row] = []
        self._new_traffic: list[Row] = []

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        """Record the traffic of each site's introduction, and each node that was refused.

        The traffic is recorded as the phase "hello" and kept in memory until a round ends. A
        refused node becomes a failure of a site "unknown" with the code "not-admitted". The failure
        is written to failures.jsonl immediately. ``total_rounds`` is not used.
        """
        for site, (down, up) in participants.traffic.items():
            self._add_traffic([state.round, "hello", site, down, up, 0.0, 0, 0])
        for reason in participants.refused:
            self.failures.add(state.round, "hello", "unknown", "not-admitted", reason)

    def participants_changed(
        self, round_: int, participants: Participants, joined: list[str]
    ) -> None:
        """Record the traffic of each joined site's hello, and rewrite silos.json.

        A site describes itself and its data in its hello. The number of bytes is in
        ``participants.traffic``, and silos.json has the facts that all sites have stated.

        Args:
            round_: the round that begins. The traffic is recorded for the previous round, because
                the hello came before this round.
            participants: all sites, including the new ones.
            joined: the names of the sites that are new or came back on another node.
        """
        for site in joined:
            down, up = participants.traffic[site]
            self._add_traffic([round_ - 1, "hello", site, down, up, 0.0, 0, 0])
        self.directory.write_json(SILOS, silos_document(participants))

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Record each reply's traffic and costs, and its metrics if the phase trains or evaluates.

        Costs are the working time, steps, samples and peak memory. Names of operations that are not
        deterministic are recorded too. No file is written until the round ends.

        Metrics of the model that a site has trained belong to ``round_``. Metrics of the model that
        a site received belong to the previous round. In the final evaluation, the phase 'evaluate',
        they belong to ``round_``.
        """
        # Sites measured the model of the round before, or in the final evaluation the last model
        described = round_ - 1
        if phase == messages.EVALUATE:
            described = round_
        measured = phase in messages.TRAINING or phase == messages.EVALUATE
        for site, reply in replies.items():
            metrics = reply.metrics
            seconds = round(metrics.get(messages.SECONDS, 0.0), 3)
            steps = int(metrics.get(messages.STEPS, 0))
            samples = int(metrics.get(messages.SAMPLES, 0))
            sizes = (reply.bytes_down, reply.bytes_up)
            self._add_traffic([round_, phase, site, *sizes, seconds, steps, samples])
            peak = int(metrics.get(messages.PEAK_MEMORY, 0))
            self.peak_memory[site] = max(peak, self.peak_memory.get(site, 0))
            for key in sorted(metrics):
                if key.startswith(messages.UNREPEATABLE):
                    self.unrepeatable.add(key.removeprefix(messages.UNREPEATABLE))
                read = read_measurement(key)
                if not measured or read is None:
                    continue
                # A site measures the model that came before it trains its own
                if read.model == messages.TRAINED:
                    name, about = TRAINED_PREFIX + read.name, round_
                else:
                    name, about = read.name, described
                self._new_metrics.append([about, site, read.split, name, metrics[key]])

    def sums_measured(self, round_: int, phase: str, means: Mapping[str, float]) -> None:
        """Record the means of securely summed metrics, with "all" as the site.

        Metrics of trained models belong to ``round_``. Metrics of the model that sites received
        belong to the previous round. In the final evaluation, the phase 'evaluate', they belong to
        ``round_``.

        Args:
            round_: the round, from 1.
            phase: the phase in which the sites measured.
            means: ``<model>.<split>.<metric>`` -> the mean over all samples of all sites. The model
                is the received or the trained one.
        """
        described = round_ - 1
        if phase == messages.EVALUATE:
            described = round_
        for model, split, metric, value in messages.measurements(means):
            name, about = TRAINED_PREFIX + metric, round_
            if model == messages.INCOMING:
                name, about = metric, described
            self._new_metrics.append([about, ALL, split, name, value])

    def updates_measured(
        self, round_: int, phase: str, contributions: Mapping[str, UpdateStatistics]
    ) -> None:
        """Record the norm of each site's update, and its cosine to the change of the global model.

        The rows of metrics.csv belong to ``round_``. Their split is "update", and their metric is
        "norm" or "cosine". A cosine is None, and is left out, if the update or the change is 0.
        ``phase`` is not used.

        Args:
            round_: the round.
            phase: the phase whose replies are updates.
            contributions: site -> the norm and the cosine of its update.
        """
        for site, part in contributions.items():
            self._new_metrics.append([round_, site, UPDATE, "norm", part.norm])
            if part.cosine is not None:
                self._new_metrics.append([round_, site, UPDATE, "cosine", part.cosine])

    def answer_failed(self, round_: int, phase: str, site: str, code: str, cause: str) -> None:
        """Append a failure to ``failures.jsonl``, if there is no equal failure yet."""
        self.failures.add(round_, phase, site, code, cause)

    def round_ended(self, state: State) -> None:
        """Append the rows recorded since the last call to metrics.csv and traffic.csv.

        In metrics.csv, rows of rounds before ``state.round`` become final. Rows of ``state.round``
        are open, and the next call overwrites them. The reason is that sites measure this round's
        model one round later, and the file is sorted by round and site. Every row of traffic.csv is
        final immediately.
        """
        # The sites measure a round's model one round later, so this round's rows may still grow
        rows = sorted([*self.open, *self._new_metrics], key=_ORDER)
        # ``rows`` is sorted by round, so the final rows are its beginning
        final = [row for row in rows if row[0] < state.round]
        self.open = rows[len(final) :]
        self.last = [row for row in [*self.last, *final] if row[0] == state.round - 1]
        self.metrics.write(final, self.open)
        self.traffic.write(self._new_traffic)
        self.written = self._new_metrics, self._new_traffic
        self._new_metrics, self._new_traffic = [], []

    run_ended = round_ended  # the final evaluation adds rows after the last round

    def state(self) -> Any:
        """Return the recorder's values for a checkpoint, in a form that JSON can hold.

        A row of metrics.csv is final once the next round has ended, in which the sites measure the
        row's model. A row of traffic.csv is final at once. The keys are:

        - "metrics" and "traffic": the size in bytes and the CRC-32 of the final rows in that CSV
          file,
        - "open": the rows of metrics.csv that are not final,
        - "last": the rows of metrics.csv for the newest final round,
        - "sites": site -> bytes down, bytes up and seconds of work,
        - "peak-memory": site -> bytes,
        - "unrepeatable": the names of operations that are not deterministic,
        - "failures": the entries of failures.jsonl.
        """
        return {
            "metrics": self.metrics.final,
            "traffic": self.traffic.final,
            "open": self.open,
            "last": self.last,
            "sites": self.sites,
            "peak-memory": self.peak_memory,
            "unrepeatable": sorted(self.unrepeatable),
            "failures": self.failures.entries,
        }

    def restore(self, state: Any) -> None:
        """Restore the values of a checkpoint, and continue both CSV files after their final rows.

        Failures in the checkpoint that failures.jsonl lacks are appended to that file.

        Args:
            state: the values that the method ``state`` returned, as parsed from JSON.

        Raises:
            CheckpointError: a CSV file does not begin with the bytes that the checkpoint recorded.
        """
        self.metrics.restore(state["metrics"])
        self.traffic.restore(state["traffic"])
        self.open, self.last = state["open"], state["last"]
        # JSON has turned the tuples into lists
        self.sites = {}
        for site, (down, up, took) in state["sites"].items():
            self.sites[site] = (down, up, took)
        self.peak_memory = state["peak-memory"]
        # A run that an earlier version began has its failures only here
        for entry in state["failures"]:
            where = entry["round"], entry["phase"], entry["site"]
            cause = entry.get("cause") or entry["reason"]
            self.failures.add(*where, entry.get("code", "site"), cause)
        self.unrepeatable = set(state["unrepeatable"])

    def values(
        self, round_: int, split: str, *, trained: bool = False
    ) -> dict[str, dict[str, float]]:
        """Return the metrics of a round on one split: site -> metric -> value, sorted by site.

        Only the last finished round, the round before it and the unfinished round are available.
        For any other round, the mapping is empty. Securely summed metrics are under the name "all".
        If a metric was recorded twice, the later value is returned.

        Args:
            round_: the round that the metrics belong to.
            split: ``train``, ``val`` or ``test``.
            trained: if True, the metrics are those of the models that the sites have trained, and
                their prefix ``trained-`` is removed. Otherwise they are those of the received
                model.
        """
        found: dict[str, dict[str, float]] = {}
        # Older rows are only in the file, because no hook needs them during the run
        for row in [*self.last, *self.open, *self._new_metrics]:
            metric = row[3]
            if (
                row[0] == round_
                and row[2] == split
                and metric.startswith(TRAINED_PREFIX) == trained
            ):
                found.setdefault(row[1], {})[metric.removeprefix(TRAINED_PREFIX)] = row[4]
        return dict(sorted(found.items()))

    def totals(self) -> dict[str, int]:
        """Return the total bytes over all sites: "down" to the sites and "up" from them."""
        total = {"down": 0, "up": 0}
        for down, up, _ in self.sites.values():
            total["down"] += down
            total["up"] += up
        return total

    def _add_traffic(self, row: Row) -> None:
        """Record one message's row of traffic.csv, and add it to the totals of its site."""
        self._new_traffic.append(row)
        down, up, seconds = self.sites.get(row[2], (0, 0, 0.0))
        self.sites[row[2]] = (down + row[3], up + row[4], round(seconds + row[5], 3))
