"""One training of ``fedsilo finetune``: from one start and one seed to the best epoch."""

import math
import time
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.segmentation.pyramids import Segmenter
from fedsilo.server_app.studies.finetune.settings import takes
from fedsilo.server_app.studies.finetune.tasks import Downstream, Pooled, cosine_epochs
from fedsilo.server_app.studies.finetune.transfer import (
    DistilReport,
    TransferReport,
    distil,
    transfer,
)
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
    """The outcome of one seed."""

    seed: int
    epoch: int  # the one with the best validation metric, from 1
    val: dict[str, float]  # metrics of that epoch
    test: dict[str, float]
    curves: tuple[tuple[int, str, str, float], ...]  # (epoch, split, metric, value) of all epochs
    arrays: Arrays  # the network's after that epoch, on the CPU
    seconds: float


def start(
    study: Study, source: Source | None, seed: int
) -> tuple[nn.Module, TransferReport | DistilReport | None]:
    """Return a network initialised by ``source`` (None: the seed alone), and what it took from it.

    The seed's own values are the same for every start: starts differ only in what they took.

    Raises:
        SettingError: nothing of the weights fits.
    """
    settings = _seeded(study.settings, seed)
    network = study.downstream.build(settings, study.data.task)
    if source is None:
        return study.compute.place(network), None
    if isinstance(source, RunModel) and not takes(study.downstream.network, source):
        learner, compute = cast(Segmenter, study.compute.place(network)), study.compute
        report = distil(learner, source, study.data.train, settings, compute, study.distil_epochs)
        return learner, report
    classes = (study.data.classes, study.data.task.classes)
    taken = transfer(study.downstream.trunk(network), source, settings, classes)
    network.requires_grad_(True)
    return study.compute.place(network), taken


def _seeded(settings: CommonSettings, seed: int) -> CommonSettings:
    """Return settings with the seed of weights and batches; the data keep their own."""
    return replace(settings, seed=derive_seed(seed, "finetune") % 2**31)


def train(study: Study, network: nn.Module, seed: int) -> Trained:
    """Train a network in place for all epochs and measure the best one on the test images.

    Raises:
        SiteError: training diverged.
    """
    began, task, compute = time.monotonic(), study.downstream, study.compute
    settings, data = _seeded(study.settings, seed), study.data
    curves: list[tuple[int, str, str, float]] = []
    best: tuple[tuple[float, float], int, dict[str, float], Arrays] | None = None
    course = (network, task.objective(network), data.train, settings, compute)
    losses = cosine_epochs(*course, epochs=study.epochs, purpose="finetune")
    for epoch, loss in enumerate(losses, start=1):
        val = task.measured(network, data.val, settings, compute)
        if not math.isfinite(val["loss"]):
            raise SiteError(
                "training diverged, validation loss is not finite: lower 'learning-rate'"
            )
        curves.append((epoch, "train", "loss", loss))
        curves += [(epoch, "val", name, value) for name, value in val.items()]
        score = (val.get(task.headline, -math.inf), -val["loss"])
        if best is None or score > best[0]:
            state = network.state_dict()
            arrays = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
            best = (score, epoch, val, arrays)
    assert best is not None, "there is at least one epoch"
    _, epoch, val, arrays = best
    network.load_state_dict(arrays)
    test = task.measured(network, data.test, settings, compute)
    seconds = time.monotonic() - began
    return Trained(seed, epoch, val, test, tuple(curves), arrays, seconds)
