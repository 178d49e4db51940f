"""What a message costs in addition to training: CPU milliseconds per message of the inline engine.

    python benchmarks/message_cost.py [--rounds 40] [--silos 10]

FedAvg over silos of digits, one optimiser step of 16 samples a message and nothing measured but the
final model, so that what is left is the round itself: message, checks, records, checkpoint. The CPU
time of the same steps in a bare loop is subtracted. Imports and the first round are not counted.
"""

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Mapping

import torch

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.server_app.config.settings import resolve

BATCH = 16


def values(silos: int, rounds: int) -> dict[str, bool | int | float | str]:
    """Return the settings of a run of one step a message."""
    return {
        "method": "fedavg",
        "dataset": "digits",
        "split.silos": silos,
        "split.silo-train-size": 40,
        "split.silo-test-size": 10,
        "rounds": rounds,
        "train.local-steps": 1,
        "train.batch-size": BATCH,
        "network.width": 4,
        "train.mc-passes": 0,
        "network.dropout": 0.0,
        "server.evaluate-every": 0,
        "machine.device": "cpu",
        "run.name": "run",
    }


def run_seconds(settings: Mapping[str, bool | int | float | str]) -> float:
    """Return the CPU seconds of a run by the inline engine."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        resolved = resolve({**settings, "run.out": folder, "data.cache-dir": f"{folder}/cache"})
        began = time.process_time()
        run_inline(resolved, int(settings["split.silos"]))
        return time.process_time() - began


def bare_seconds(messages: int) -> float:
    """Return the CPU seconds of as many steps of the same network in a bare loop."""
    network = build_classifier(CommonSettings(width=4, dropout=0.0), NetworkShape((1, 16, 16), 10))
    optimiser = torch.optim.Adam(network.parameters())
    inputs, labels = torch.rand(BATCH, 1, 16, 16), torch.randint(10, (BATCH,))
    network.train()
    began = time.process_time()
    for _ in range(messages):
        optimiser.zero_grad()
        network.loss(inputs, labels).backward()
        optimiser.step()
    return time.process_time() - began


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silos", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run_seconds(values(options.silos, 2))  # imports, caches
    # Start and end of a run cost the same however many rounds it has
    short = run_seconds(values(options.silos, 2))
    long = run_seconds(values(options.silos, 2 + options.rounds))
    messages = options.silos * options.rounds
    bare_seconds(10)
    per_message, bare = (long - short) / messages, bare_seconds(messages) / messages
    metrics = {"messages": messages, "ms": per_message * 1e3, "training-ms": bare * 1e3}
    metrics["beside-training-ms"] = metrics["ms"] - metrics["training-ms"]
    print(json.dumps({name: round(value, 2) for name, value in metrics.items()}))


if __name__ == "__main__":
    main()
