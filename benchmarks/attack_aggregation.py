"""What one bad site of six does to a model, by how the weights of sites become one.

    python benchmarks/attack_aggregation.py --data-dir DIR --csv FILE [--tasks heart digits]

FedAvg on six silos that a Dirichlet draw (concentration 1) cuts from real data: heart disease and
digits. The last site sends its update times 1,000, with its sign flipped, or normal noise of sd 1
in place of it, or trains on labels that are flipped. ``limit`` is 'mean' with
'server.max-update-norm' at its default; in all other columns that limit is off, so that they show
what the aggregation alone holds. Numbers are accuracies after the last round on the test samples of
the five honest sites, the mean of three seeds; a run that the attack has ended counts as the
accuracy of guessing.
"""

import argparse
import contextlib
import dataclasses
import io
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
from flwr.app import Array, ArrayRecord, Message

import fedsilo.client_app.opening
import fedsilo.engines.inline_engine
from fedsilo.core.errors import FedsiloError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.messages import ARRAYS
from fedsilo.core.seeding import derive_seed
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo
from fedsilo.engines.inline_engine import InlineGrid, run_inline
from fedsilo.server_app.config.settings import resolve

SITES, BAD = 6, "silo-6"
TASKS: Mapping[str, Mapping[str, Value]] = {
    "heart": {
        "dataset": "heart",
        "network.name": "mlp",
        "network.width": 8,
        "rounds": 6,
        "train.local-steps": 20,
        "train.weight-decay": 0.1,
    },
    "digits": {"dataset": "digits", "network.width": 6, "rounds": 5, "train.local-steps": 10},
}
COMMON: Mapping[str, Value] = {
    "method": "fedavg",
    "split.partition": "dirichlet",
    "split.concentration": 1.0,
    "split.silos": SITES,
    "run.min-sites": SITES - 1,
    "train.batch-size": 16,
    "train.learning-rate": 0.003,
    "network.dropout": 0.0,
    "train.mc-passes": 0,
    "server.evaluate-every": 0,
    "machine.device": "cpu",
    "server.max-update-norm": 0.0,
}
COLUMNS: Mapping[str, Mapping[str, Value]] = {
    "mean": {},
    "limit": {"server.max-update-norm": 100.0},
    **{name: {"aggregation": name} for name in ("norm-clip", "median", "trimmed", "multikrum")},
}
ATTACKS = ("none", "times 1,000", "sign flipped", "noise", "labels flipped")
SEEDS = (0, 1, 2)
_HEADER = ["task", "attack", "aggregation", "seed", "accuracy"]


class BadGrid(InlineGrid):
    """Alters what the last node answers, as ``attack`` says."""

    attack = "none"
    sent: dict[str, Message] = {}  # noqa: RUF012  # of one run at a time

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep what is sent, which an update is measured from."""
        listed = list(messages)
        ids = list(super().push_messages(listed))
        self.sent.update(zip(ids, listed, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Alter the bad site's arrays."""
        for reply in super().pull_messages(message_ids):
            message = self.sent.pop(reply.metadata.reply_to_message_id)
            bad = reply.metadata.src_node_id == max(self.get_node_ids())
            if bad and reply.has_content() and ARRAYS in reply.content.array_records:
                reply.content[ARRAYS] = self._altered(
                    message.content.array_records[ARRAYS], reply.content.array_records[ARRAYS]
                )
            yield reply

    def _altered(self, before: ArrayRecord, after: ArrayRecord) -> ArrayRecord:
        draw, altered = np.random.default_rng(derive_seed(0, "attack")), ArrayRecord()
        for name, array in after.items():
            old, new = before[name].numpy(), array.numpy()
            changed = {
                "times 1,000": old + np.float32(1000) * (new - old),
                "sign flipped": old - (new - old),
                "noise": old + draw.standard_normal(old.shape, np.float32),
            }.get(self.attack, new)
            if name.endswith("running_var"):  # below 0 it would be refused
                changed = np.abs(changed)
            altered[name] = Array(np.asarray(changed, np.float32))
        return altered


def flipped(name: str, *arguments: Any) -> Silo:
    """Return a silo, the bad site's with training labels in reverse order."""
    silo = load_silo(name, *arguments)
    if name != BAD:
        return silo
    labels = silo.shape.outputs - 1 - silo.train.labels
    return dataclasses.replace(silo, train=dataclasses.replace(silo.train, labels=labels))


@contextlib.contextmanager
def attacked(attack: str) -> Iterator[None]:
    """Let the last site be bad in the block."""
    BadGrid.attack = attack
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(fedsilo.engines.inline_engine, "InlineGrid", BadGrid))
        if attack == "labels flipped":
            stack.enter_context(mock.patch.object(fedsilo.client_app.opening, "load_silo", flipped))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def accuracy(values: Mapping[str, Value], attack: str, classes: int) -> float:
    """Return the accuracy on the honest sites' test samples of a run under an attack."""
    with tempfile.TemporaryDirectory() as out, attacked(attack):
        settings = resolve({**values, "run.out": out, "run.name": "run"})
        try:
            run = run_inline(settings, SITES)
        except FedsiloError:
            return 1 / classes
        silos, sites = run.read_json("silos.json"), run.read_json("summary.json")["sites"]
        found = {site: metrics["accuracy"] for site, metrics in sites.items() if site != BAD}
        sizes = [silos[site]["sizes"]["test"] for site in found]
        return float(np.average(list(found.values()), weights=sizes))


def main() -> None:
    """Run all, print the table and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    options = parser.parse_args()
    rows = []
    for task in options.tasks:
        classes = 2 if task == "heart" else 10
        for attack in ATTACKS:
            for column, changes in COLUMNS.items():
                values = {**COMMON, **TASKS[task], **changes, "data.dir": options.data_dir}
                for seed in SEEDS:
                    found = accuracy({**values, "seed": seed}, attack, classes)
                    rows.append([task, attack, column, seed, round(found, 4)])
            table = pd.DataFrame(rows, columns=_HEADER)
            write_atomically(options.csv, table.to_csv(index=False))
            print(task, attack, "done", flush=True)
    spread = table.groupby(["task", "attack", "aggregation"], sort=False)["accuracy"].mean()
    print(spread.unstack(sort=False).round(3).to_string())


if __name__ == "__main__":
    main()
