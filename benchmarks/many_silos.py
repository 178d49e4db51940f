"""What a server's memory and a message cost in federations of hundreds of sites.

    python benchmarks/many_silos.py [trained | replies | ...] --data-dir DIR [--csv FILE]

``trained``: FedAvg by the inline engine on silos of 20 real MNIST images, a network of 0.5 MB: 10
and 300 silos, 20 rounds each. ``thousand``: 1,000 silos, 3 rounds. ``processes``: 10 and 1,000
silos of the same by the command and its engine of processes, 10 rounds; ``peak`` is then of all
processes, shared pages by their share (PSS). ``replies``: 6 and 60 sites of a whole ViT-S (87 MB),
whose replies are made on the fly, so that it is the server alone that is measured; two rounds, with
'aggregation' mean, and of 60 sites also median. Each case is a process of its own. ``peak`` is its
largest resident size, ``over bare`` what that is above the process once all is imported,
``anonymous`` the same without the pages of files that are mapped. ``first`` and ``last``: CPU
seconds a message, with all that the server does, in round 2 and the last.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import peers
import tomli_w
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedsilo.engines.inline_engine
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.messages import (
    ARRAYS,
    CONFIG,
    METRICS,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SECONDS,
)
from fedsilo.core.settings_schema import Value
from fedsilo.core.site_facts import SiteFacts
from fedsilo.engines.inline_engine import (
    InlineGrid,
    flower_identity,
    partition_configs,
    run_inline,
)
from fedsilo.pictures.learning_curves import draw_pictures
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.run.runner import run

_MIB = 2**20
_TRAINED: Mapping[str, Value] = {
    "method": "fedavg",
    "dataset": "mnist",
    "split.silo-train-size": 20,
    "split.silo-test-size": 5,
    "train.local-steps": 1,
    "train.batch-size": 8,
    "network.width": 14,
    "server.evaluate-every": 0,
    "train.mc-passes": 0,
    "machine.device": "cpu",
    "seed": 1,
}
_REPLIES: Mapping[str, Value] = {
    "method": "fedavg",
    "dataset": "isic2019",
    "network.name": "vit",
    "vit.train-backbone": True,
    "vit.prompt-sets": "none",
    "vit.backbone-weights": "random",
    "rounds": 2,
    "machine.device": "cpu",
    "seed": 1,
}
_CLASSES = 2
CASES: Mapping[str, tuple[str, int, Mapping[str, Value]]] = {
    "10 silos trained": ("trained", 10, {**_TRAINED, "rounds": 20}),
    "300 silos trained": ("trained", 300, {**_TRAINED, "rounds": 20}),
    "1000 silos trained": ("thousand", 1000, {**_TRAINED, "rounds": 3}),
    "10 silos by processes": ("processes", 10, {**_TRAINED, "rounds": 10}),
    "1000 silos by processes": ("processes", 1000, {**_TRAINED, "rounds": 10}),
    "6 sites of a ViT-S": ("replies", 6, _REPLIES),
    "60 sites of a ViT-S": ("replies", 60, _REPLIES),
    "60 sites of a ViT-S, median": ("replies", 60, {**_REPLIES, "aggregation": "median"}),
}


def made_up_app() -> ClientApp:
    """Return an app that answers with the arrays that it got, each number a little different."""
    app, sizes = ClientApp(), {"train": [50, 50], "val": [0, 0], "test": [5, 5]}

    def hello(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        prints = {split: f"{number:063x}{place}" for place, split in enumerate(sizes)}
        facts = SiteFacts(
            *(f"s{number:03}", "all", (3, 224, 224), _CLASSES, sizes, prints), simulated=True
        )
        return Message(RecordDict({CONFIG: ConfigRecord(facts.to_config())}), reply_to=message)

    def answer(message: Message, context: Context) -> Message:
        metrics = {NUM_EXAMPLES: 100, SECONDS: 0.0, PEAK_MEMORY: 0, "trained.train.loss": 1.0}
        measured = {f"incoming.test.{m}": 0.5 for m in ("accuracy", "entropy", "loss")}
        content = RecordDict({METRICS: MetricRecord(metrics | measured)})
        if message.content.config_records[CONFIG]["returns"]:
            draw = np.random.default_rng(int(context.node_config["partition-id"]))
            content[ARRAYS] = ArrayRecord()
            for name, array in message.content.array_records[ARRAYS].items():
                received = array.numpy()
                step = draw.standard_normal(received.shape, np.float32) * np.float32(1e-3)
                content.array_records[ARRAYS][name] = Array(np.asarray(received + step))
        return Message(content, reply_to=message)

    app.query("hello")(hello)
    app.train()(answer)
    app.evaluate()(answer)
    return app


class TimedGrid(InlineGrid):
    """Takes note of when each message was answered, with its round."""

    answered: list[tuple[str, float]] = []  # noqa: RUF012  # one process, one grid

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer, and take note."""
        for reply in super().pull_messages(message_ids):
            self.answered.append((reply.metadata.group_id, time.process_time()))
            yield reply


def seconds_a_message(round_: int) -> float:
    """Return the CPU seconds from the last answer of the round before to the last of this one."""
    before, here = (
        [at for group, at in TimedGrid.answered if group == str(r)] for r in (round_ - 1, round_)
    )
    return (here[-1] - before[-1]) / len(here)


def status(key: str) -> float:
    """Return a line of this process's status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


@contextmanager
def peak_of(key: str) -> Any:
    """Give a list whose last number is the largest that was seen, once the block has ended."""
    seen, over = [status(key)], Event()

    def watch() -> None:
        while not over.wait(0.02):
            seen[0] = max(seen[0], status(key))

    thread = Thread(target=watch, daemon=True)
    thread.start()
    yield seen
    over.set()
    thread.join()


def measured(name: str, data_dir: str) -> dict[str, Any]:
    """Run a case here and return what it took."""
    kind, sites, values = CASES[name]
    bare, anonymous = status("VmRSS"), status("RssAnon")
    with tempfile.TemporaryDirectory() as out, peak_of("RssAnon") as seen:
        paths = {
            "run.out": out,
            "run.name": "run",
            "data.dir": data_dir,
            "data.cache-dir": f"{out}/cache",
        }
        made_up = kind == "replies"
        cut = {} if made_up else {"split.silos": sites}
        settings = resolve({**values, **paths, **cut})
        with mock.patch.object(fedsilo.engines.inline_engine, "InlineGrid", TimedGrid):
            if not made_up:
                draw_pictures(run_inline(settings, sites), print)
            else:
                with flower_identity():
                    run(TimedGrid(made_up_app(), {}, partition_configs(sites)), settings)
        model = (Path(out) / "run" / "model.safetensors").stat().st_size / _MIB
    rounds = settings.common.rounds
    return {
        "case": name,
        "rounds": rounds,
        "model": f"{model:.1f}",
        "peak": f"{status('VmHWM'):,.0f}",
        "over bare": f"{status('VmHWM') - bare:,.0f}",
        "anonymous": f"{seen[0] - anonymous:,.0f}",
        "first": f"{seconds_a_message(2):.4f}",
        "last": f"{seconds_a_message(rounds):.4f}",
    }


def measured_by_processes(name: str, data_dir: str) -> dict[str, Any]:
    """Run a case by the command and return what all of its processes took."""
    _, sites, values = CASES[name]
    with tempfile.TemporaryDirectory() as out:
        paths = {
            "run.out": out,
            "run.name": "run",
            "data.dir": data_dir,
            "data.cache-dir": f"{out}/cache",
        }
        settings = Path(out) / "settings.toml"
        settings.write_text(tomli_w.dumps({**values, **paths, "split.silos": sites}))
        found = peers.measured(peers.rivals("", settings)[peers.OURS], Path(out))
        model = (Path(out) / "run" / "model.safetensors").stat().st_size / _MIB
    rounds = int(values["rounds"])
    return {
        "case": name,
        "rounds": rounds,
        "model": f"{model:.1f}",
        "peak": f"{found['peak MiB']:,.0f}",
        "last": f"{found['CPU s'] / rounds / sites:.4f}",
    }


def main() -> None:
    """Measure each case in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = list(dict.fromkeys(kind for kind, _, _ in CASES.values()))
    parser.add_argument("kinds", nargs="*", default=[], help=", ".join(kinds))
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        by = measured_by_processes if CASES[options.case][0] == "processes" else measured
        print(json.dumps(by(options.case, options.data_dir)))
        return
    rows = []
    for name, (kind, _, _) in CASES.items():
        if not options.kinds or kind in options.kinds:
            command = [sys.executable, __file__, "--case", name, "--data-dir", options.data_dir]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    print(table.to_string(index=False))
    if options.csv:
        write_atomically(options.csv, table.to_csv(index=False))


if __name__ == "__main__":
    main()
