"""The job that `benchmarks/peers.py` gives to all: one FedAvg over fedsilo's silos and network.

Run by name it is one rival, in a process of its own, and prints how long its rounds took:

    python benchmarks/peer_job.py bare | inline | processes | ray --settings FILE.json

Flower's and NVFlare's own are in ``peer_flower.py`` and ``peer_nvflare.py``.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.server_app.config.resources import check_resources
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.server_app.run.planning import start

Weights = dict[str, Tensor]


def read_settings(path: Path) -> RunSettings:
    """Return the settings that all rivals share; one thread for each client."""
    settings = resolve(json.loads(path.read_text()))
    torch.set_num_threads(settings.common.threads)
    return settings


@cache
def silo(number: int, settings: CommonSettings) -> Silo:
    """Return a client's data, read once a process."""
    return load_silo(silo_names(settings)[number], settings)


def first_weights(settings: CommonSettings) -> Weights:
    """Return the weights that all start from."""
    return exchanged_arrays(build_classifier(settings, silo(0, settings).task))


def trained(
    weights: Mapping[str, Tensor], number: int, round_: int, settings: CommonSettings
) -> Weights:
    """Return a client's weights after its local epochs."""
    data = silo(number, settings)
    network = build_classifier(settings, data.task)
    load_exchanged(network, weights)
    network.train()
    optimiser = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    order = torch.Generator().manual_seed(1000 * round_ + number)
    for _ in range(settings.local_epochs):
        shuffled = torch.randperm(len(data.train), generator=order)
        for chosen in torch.split(shuffled, settings.batch_size):
            optimiser.zero_grad(set_to_none=True)
            loss = network.loss(data.train.inputs[chosen], data.train.labels[chosen])
            loss.backward()
            optimiser.step()
    return exchanged_arrays(network)


def accuracy(weights: Mapping[str, Tensor], settings: CommonSettings) -> float:
    """Return the mean test accuracy over the clients."""
    network = build_classifier(settings, silo(0, settings).task)
    load_exchanged(network, weights)
    network.eval()
    right = []
    with torch.inference_mode():
        for number in range(len(silo_names(settings))):
            test = silo(number, settings).test
            answers = torch.cat([network(part) for part in torch.split(test.inputs, 256)])
            right.append((answers.argmax(dim=1) == test.labels).double().mean().item())
    return sum(right) / len(right)


def bare(settings: RunSettings) -> dict[str, float]:
    """Train in a plain loop: no framework, no messages, no files."""
    common = settings.common
    clients = range(len(silo_names(common)))
    samples = [len(silo(number, common).train) for number in clients]
    weights = first_weights(common)
    began = time.perf_counter()
    for round_ in range(1, common.rounds + 1):
        total: Weights = {}
        for number in clients:
            share = samples[number] / sum(samples)
            for name, tensor in trained(weights, number, round_, common).items():
                total[name] = total.get(name, torch.zeros(())) + share * tensor.double()
        weights = {name: tensor.float() for name, tensor in total.items()}
    found = accuracy(weights, common)
    return {"rounds": time.perf_counter() - began, "accuracy": found}


def by_fedsilo(settings: RunSettings, engine: str) -> dict[str, float]:
    """Train by fedsilo: messages checked, metrics, traffic and a checkpoint written each round."""
    settings = replace(settings, common=replace(settings.common, run_name=engine))
    nodes = len(silo_names(settings.common))
    directory = start(settings, check_resources({"num-supernodes": nodes}), engine)
    summary = directory.read_json("summary.json")
    return {"rounds": summary["seconds"]["rounds"], "accuracy": summary["mean"]["accuracy"]}


def main() -> None:
    """Run one rival and print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rival", choices=["bare", "inline", "processes", "ray"])
    parser.add_argument("--settings", type=Path, required=True)
    options = parser.parse_args()
    settings = read_settings(options.settings)
    found = bare(settings) if options.rival == "bare" else by_fedsilo(settings, options.rival)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
