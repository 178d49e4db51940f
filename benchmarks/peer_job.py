"""The job that `benchmarks/peers.py` gives to all: one FedAvg over fedsilo's silos and network.

Run by name it is the bare loop, one client after the other, and prints how long its rounds took:

    python benchmarks/peer_job.py --settings FILE.toml

Flower's and NVFlare's own are in ``peer_flower.py`` and ``peer_nvflare.py``.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged
from fedsilo.server_app.config.settings import RunSettings, read_toml, resolve

Weights = dict[str, Tensor]


def read_settings(path: Path) -> RunSettings:
    """Return the settings that all rivals share; one thread for each client."""
    settings = resolve(read_toml(path))
    torch.set_num_threads(settings.common.threads)
    return settings


@cache
def silo(number: int, settings: CommonSettings) -> Silo:
    """Return a client's data, read once a process; a table is standardised by its own samples."""
    data = load_silo(silo_names(settings)[number], settings)
    if not data.features:
        return data
    known = data.train.inputs
    mean, deviation = known.nanmean(0), (known - known.nanmean(0)).square().nanmean(0).sqrt()
    mean, deviation = mean.nan_to_num(), deviation.nan_to_num(1.0).clamp_min(1e-6)
    splits = {
        name: Split(((own.inputs - mean) / deviation).nan_to_num(), own.labels)
        for name in ("train", "test")
        for own in [getattr(data, name)]
    }
    return replace(data, **splits)


def first_weights(settings: CommonSettings) -> Weights:
    """Return the weights that all start from."""
    return exchanged_arrays(build_classifier(settings, silo(0, settings).shape))


def trained(
    weights: Mapping[str, Tensor], number: int, round_: int, settings: CommonSettings
) -> Weights:
    """Return a client's weights after its local epochs."""
    data, device = silo(number, settings), device_of(settings)
    network = build_classifier(settings, data.shape).to(device)
    load_exchanged(network, weights)
    network.train()
    inputs, labels = data.train.inputs.to(device), data.train.labels.to(device)
    optimiser = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    order = torch.Generator().manual_seed(1000 * round_ + number)
    steps = settings.local_steps
    steps = steps or settings.local_epochs * math.ceil(len(data.train) / settings.batch_size)
    for chosen in islice(_batches(len(data.train), settings.batch_size, order), steps):
        optimiser.zero_grad(set_to_none=True)
        loss = network.loss(inputs[chosen], labels[chosen])
        loss.backward()
        optimiser.step()
    return {name: array.cpu() for name, array in exchanged_arrays(network).items()}


def device_of(settings: CommonSettings) -> torch.device:
    """Return the first GPU if the settings name one, else the CPU."""
    if settings.device.startswith("cuda"):
        return torch.device("cuda")
    return torch.device("cpu")


def _batches(samples: int, size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Yield numbers of samples without end, each pass in another order."""
    while True:
        yield from torch.split(torch.randperm(samples, generator=order), size)


def accuracy(weights: Mapping[str, Tensor], settings: CommonSettings) -> float:
    """Return the mean test accuracy over the clients."""
    network = build_classifier(settings, silo(0, settings).shape)
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


def main() -> None:
    """Run the bare loop and print its metrics as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True)
    options = parser.parse_args()
    print(json.dumps(bare(read_settings(options.settings))), flush=True)


if __name__ == "__main__":
    main()
