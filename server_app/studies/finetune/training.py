"""One training of ``fedsilo finetune``: a network from a start and a seed, and its best epoch."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.pyramids import Segmenter
from fedsilo.server_app.studies.finetune.data import Pooled
from fedsilo.server_app.studies.finetune.distil import DistilReport, distil
from fedsilo.server_app.studies.finetune.epochs import cosine_epochs
from fedsilo.server_app.studies.finetune.settings import takes
from fedsilo.server_app.studies.finetune.tasks import Downstream
from fedsilo.server_app.studies.finetune.transfer import TransferReport, transfer
from fedsilo.server_app.studies.finetune.weights import RunModel, Source

Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class Study:
    """Everything that is the same for all starts."""

    downstream: Downstream
    settings: CommonSettings
    data: Pooled
    compute: Compute
    seeds: int
    epochs: int
    distil_epochs: int = 0


@dataclass(frozen=True)
class Trained:
    """What came of one seed.

    Attributes:
        seed: the seed.
        epoch: the one with the best validation figure, from 1.
        val, test: the figures of that epoch.
        curves: (epoch, split, metric, value) of all epochs.
        arrays: the network's of that epoch, on the CPU.
        seconds: what it took.
    """

    seed: int
    epoch: int
    val: dict[str, float]
    test: dict[str, float]
    curves: tuple[tuple[int, str, str, float], ...]
    arrays: Arrays
    seconds: float


def start(
    study: Study, source: Source | None, seed: int
) -> tuple[nn.Module, TransferReport | DistilReport | None]:
    """Return a network that starts from given weights, or from the seed alone, and what it took.

    The seed's weights are the same for every start, so that starts differ in what they took.

    Raises:
        SettingError: nothing of the weights fits.
    """
    settings = _seeded(study.settings, seed)
    network = study.downstream.build(settings, study.data.task)
    if source is None:
        return study.compute.place(network), None
    if isinstance(source, RunModel) and not takes(study.downstream.network, source):
        network, compute = study.compute.place(network), study.compute
        learner = cast(Segmenter, network)
        epochs = study.distil_epochs
        return network, distil(learner, source, study.data.train, settings, compute, epochs)
    classes = (study.data.classes, study.data.task.classes)
    report = transfer(study.downstream.trunk(network), source, settings, classes)
    network.requires_grad_(True)
    return study.compute.place(network), report


def _seeded(settings: CommonSettings, seed: int) -> CommonSettings:
    """Return settings with a seed for weights and batches; that of the data is another."""
    values = vars(settings) | {"seed": derive_seed(seed, "finetune") % 2**31}
    return CommonSettings(**values)


def train(study: Study, network: nn.Module, seed: int) -> Trained:
    """Train a network in place for all epochs, on a cosine, and read the test images once.

    Raises:
        SiteError: training diverged.
    """
    began, task, compute = time.monotonic(), study.downstream, study.compute
    settings, data = _seeded(study.settings, seed), study.data
    curves: list[tuple[int, str, str, float]] = []
    best: tuple[tuple[float, float], int, dict[str, float], Arrays] | None = None
    epochs = cosine_epochs(
        network,
        task.objective(network),
        data.train,
        settings,
        compute,
        epochs=study.epochs,
        purpose="finetune",
    )
    for epoch, loss in enumerate(epochs, start=1):
        val = task.measured(network, data.val, settings, compute)
        if not math.isfinite(val["loss"]):
            raise SiteError(
                "training diverged, validation loss is not finite: lower 'learning-rate'"
            )
        curves.append((epoch, "train", "loss", loss))
        curves += [(epoch, "val", name, value) for name, value in val.items()]
        score = (val.get(task.headline, -math.inf), -val["loss"])
        if best is None or score > best[0]:
            best = (score, epoch, val, _copy(network))
    assert best is not None, "there is at least one epoch"
    _, epoch, val, arrays = best
    network.load_state_dict(arrays)
    test = task.measured(network, data.test, settings, compute)
    seconds = time.monotonic() - began
    return Trained(seed, epoch, val, test, tuple(curves), arrays, seconds)


def _copy(network: nn.Module) -> Arrays:
    return {name: tensor.detach().cpu().clone() for name, tensor in network.state_dict().items()}
