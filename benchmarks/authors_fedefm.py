"""The authors' FedEFM code next to ours: the same tensors, network, initial weights and steps.

    git clone https://github.com/aioz-ai/FedEFM DIR
    python benchmarks/authors_fedefm.py --fedefm DIR --data-dir DATA [--csv FILE]

Their public code has neither EMD nor distillation: a silo trains, its neighbours' models take a
step on its images, and its next model is half its own, half their weighted sum. Their
``Peer2PeerNetwork.mix`` and ``FemnistCNN`` run as they are, with our network in place of theirs.
Ours is 'fedefm.visit' average. Their weights of a complete graph are 1/n for n - 1 neighbours, so
that a mean shrinks; the row 'weights 1/(n-1)' gives them a sum of 1, as ours.

Nothing of theirs is in this repository. Modules that load their data and logs are replaced.
"""

import argparse
import csv
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.datasets.silo.silos import Silo
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.server_app.config.settings import RunSettings, resolve

SCORES = ("mean model", "own models", "own models, own labels")


class _Logits(nn.Module):
    """Our network as a function of images to logits."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network.classify(self.network.features(self.network.encode(images)))
        return logits


def their_modules(folder: Path) -> tuple[Any, Any]:
    """Return the authors' modules of communication and of the model that trains by batches."""
    for name, objects in {
        "utils.utils": ("get_network", "get_iterator", "get_model", "args_to_string", "EXTENSIONS",
                        "logger_write_params", "print_model", "get_multi_network"),
        "utils.metrics": ("accuracy",),
        "torch.utils.tensorboard": ("SummaryWriter",),
    }.items():  # fmt: skip
        module = types.ModuleType(name)
        vars(module).update(dict.fromkeys(objects))
        sys.modules[name] = module
    # Their 'models' has no __init__.py: a folder of that name with one would go before it
    others = [path for path in sys.path if not (Path(path) / "models" / "__init__.py").is_file()]
    sys.path[:] = [str(folder), *others]
    cnn = __import__("models.femnist.cnn", fromlist=["FemnistCNN"])
    return __import__("communication"), cnn


def authors(
    given: argparse.Namespace, settings: RunSettings, modules: tuple[Any, Any], weight: float
) -> list[float]:
    """Run the authors' rounds with that weight for each neighbour; return the three scores."""
    communication, cnn = modules
    common = settings.common
    silos = [load_silo(site, common) for site in silo_names(common)]
    torch.manual_seed(given.seed)

    def worker() -> Any:
        model = cnn.FemnistCNN(
            nn.CrossEntropyLoss(), lambda logits, _: logits.mean(), "cpu", "adam", "constant"
        )
        model.net = _Logits(initial_classifier(common, silos[0]))
        model.optimizer = cnn.get_optimizer("adam", model.net, given.rate)
        model.lr_scheduler = cnn.get_lr_scheduler(model.optimizer, "constant", 1)
        return model

    peers = communication.Peer2PeerNetwork.__new__(communication.Peer2PeerNetwork)
    peers.args = argparse.Namespace(test=True, multigraph=False)
    peers.device, peers.fit_by_epoch, peers.local_steps = "cpu", False, 1
    peers.n_workers, peers.round_idx, peers.log_freq = len(silos), 0, given.rounds + 1
    peers.network = nx.complete_graph(len(silos))
    nx.set_edge_attributes(peers.network, weight, "weight")
    peers.edges = peers.network.edges()
    peers.workers_models = [worker() for _ in silos]
    peers.transmit_neighbor_model = [0] * len(silos)
    peers.workers_iterators = [
        DataLoader(TensorDataset(float_inputs(s.train.inputs), s.train.labels), given.batch, True)
        for s in silos
    ]
    for number in range(given.rounds):
        peers.mix(number, write_results=False)
    for model, images in zip(peers.workers_models, peers.workers_iterators, strict=True):
        model.fit_batches(images, n_steps=1)  # they, and we, measure after the local step
    return scores([model.net for model in peers.workers_models], silos)


def scores(networks: Sequence[nn.Module], silos: Sequence[Silo]) -> list[float]:
    """Return accuracy of the mean model, of own models, and of own models on own labels."""
    states = [network.state_dict() for network in networks]
    mean = {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(array.dtype)
        for name, array in states[0].items()
    }
    right: list[list[float]] = [[], [], []]
    for network, silo in zip(networks, silos, strict=True):
        labels = silo.test.labels
        known = torch.isin(labels, torch.unique(silo.train.labels))
        own = _right(network, silo)
        network.load_state_dict(mean)
        for score, found in zip(right, (_right(network, silo), own, own[known]), strict=True):
            score.append(float(found.double().mean()))
    return [sum(score) / len(score) for score in right]


def _right(network: nn.Module, silo: Silo) -> Tensor:
    """Return (n,) bool: which test images the network gets right."""
    network.eval()
    with torch.no_grad():
        return network(float_inputs(silo.test.inputs)).argmax(dim=1) == silo.test.labels


def ours(settings: RunSettings) -> list[float]:
    """Run ours; return the three scores."""
    rows = run_inline(settings, settings.common.silos).read_csv("metrics.csv")
    last = max(int(row["round"]) for row in rows)
    found = []
    for metric in ("accuracy", "own-accuracy", "own-labels-accuracy"):
        values = [
            float(row["value"])
            for row in rows
            if int(row["round"]) == last and (row["split"], row["metric"]) == ("test", metric)
        ]
        if values:  # FedAvg has no model but the mean
            found.append(sum(values) / len(values))
    return found


def settings_of(given: argparse.Namespace, **more: Value) -> RunSettings:
    """Return the settings of both sides: silos of two labels each, a step a round."""
    values: dict[str, Value] = {
        "dataset": "fmnist", "data.dir": str(given.data_dir),
        "split.partition": "unseen", "split.silos": 5,
        "split.silo-train-size": given.samples, "split.silo-test-size": 400,
        "network.name": "conv", "network.width": given.width,
        "rounds": given.rounds, "train.local-steps": 1, "train.batch-size": given.batch,
        "train.optimiser": "adamw", "train.learning-rate": given.rate, "seed": given.seed,
        "train.mc-passes": 0, "server.evaluate-every": 0,
    }  # fmt: skip
    return resolve(
        {**values, **{key.replace("__", ".").replace("_", "-"): v for key, v in more.items()}}
    )


def main() -> None:
    """Run all and print, or write, a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fedefm", type=Path, required=True, help="checkout of the authors' code")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--csv", type=Path)
    numbers = {"samples": 500, "width": 4, "rounds": 60, "batch": 32, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=0.001)
    given = parser.parse_args()
    modules = their_modules(given.fedefm)
    with tempfile.TemporaryDirectory() as out:
        own: dict[str, Value] = {"fedefm__visit": "average", "fedefm__overseas_steps": 1}
        fedefm = settings_of(given, method="fedefm", out=out, run_name="fedefm", **own)
        fedavg = settings_of(given, method="fedavg", out=out, run_name="fedavg")
        by_row = {
            "authors' code": authors(given, fedefm, modules, 1 / 5),
            "authors' code, weights 1/(n-1)": authors(given, fedefm, modules, 1 / 4),
            "our FedEFM, visit average": ours(fedefm),
            "our FedAvg, a step a round": ours(fedavg),
        }
    rows = [
        {"row": row, "seed": given.seed, **dict(zip(SCORES, found, strict=False))}
        for row, found in by_row.items()
    ]
    for row in rows:
        print(f"{row['row']:32}" + "".join(f"{row[s]:8.3f}" for s in SCORES if s in row))
    if given.csv:
        with given.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            if not file.tell():
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
