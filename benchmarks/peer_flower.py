"""Plain Flower's rival of `benchmarks/peers.py`: its own FedAvg, simulated by its own command.

python benchmarks/peer_flower.py --settings FILE.toml [--gpus SHARE]

``--gpus`` is the share of a GPU that each client gets, on which it then trains.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer_job import accuracy, first_weights, read_settings, silo, trained

from fedsilo.datasets.registry import silo_names
from fedsilo.server_app.config.settings import RunSettings


def by_flower(settings: RunSettings, gpus: float = 0.0) -> dict[str, float]:
    """Train by Flower's own FedAvg and simulation, and nothing else."""
    common, client_app, server_app = settings.common, ClientApp(), ServerApp()
    found: dict[str, float] = {}

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(common.threads)
        number = int(context.node_config["partition-id"])
        round_ = int(message.content["config"]["server-round"])
        weights = message.content["arrays"].to_torch_state_dict()
        arrays = ArrayRecord(trained(weights, number, round_, common))
        metrics = MetricRecord({"num-examples": len(silo(number, common).train)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        moments: list[float] = []

        def after(round_: int, arrays: ArrayRecord) -> MetricRecord:
            if round_ == common.rounds:
                found["accuracy"] = accuracy(arrays.to_torch_state_dict(), common)
            moments.append(time.perf_counter())
            return MetricRecord({})

        clients = len(silo_names(common))
        strategy = FedAvg(
            fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
        )
        strategy.start(
            grid, ArrayRecord(first_weights(common)), num_rounds=common.rounds, evaluate_fn=after
        )
        found["rounds"] = moments[-1] - moments[0]

    run_simulation(
        server_app,
        client_app,
        num_supernodes=len(silo_names(common)),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": gpus},
            "init_args": _room(gpus),
        },
    )
    return found


def _room(gpus: float) -> dict[str, int]:
    """Return Ray's resources: as many cores as shares of the GPU, or two cores without one."""
    if gpus:
        return {"num_cpus": int(1 / gpus), "num_gpus": 1}
    return {"num_cpus": 2}


def main() -> None:
    """Run it and print its metrics as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--gpus", type=float, default=0.0)
    options = parser.parse_args()
    found = by_flower(read_settings(options.settings), options.gpus)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
