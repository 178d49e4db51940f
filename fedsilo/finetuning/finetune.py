"""Trains a run's model on a new task, beside the same network from scratch: ``fedsilo finetune``.

All networks are trained on the pooled training images of the sites on this machine. Validation
images choose the epoch; test images are read once, for the metrics of that epoch.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from torch import nn

from fedsilo.client_app.training.compute import choose_compute, noted_operations
from fedsilo.core.errors import SiteError
from fedsilo.core.files.atomic_files import build_folder
from fedsilo.core.seeding import derive_seed
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.finetuning.finetune_request import SCRATCH, SEGMENTATION, RunModel, Source, Starts
from fedsilo.finetuning.finetune_results import FinetuneResult, StartResult, write_results
from fedsilo.finetuning.finetune_settings import takes
from fedsilo.finetuning.tasks import (
    Downstream,
    Segmentation,
    Study,
    TrainedSeed,
    chosen_sites,
    cosine_epochs,
)
from fedsilo.finetuning.transfer import DistilReport, TransferReport, distil, transfer
from fedsilo.models.networks.segmentation.pyramids import Segmenter

Say = Callable[[str], None]


def open_study(
    task: str,
    network: str,
    settings: CommonSettings,
    sites: Sequence[str],
    seeds: int,
    epochs: int,
    distil_epochs: int,
) -> Study:
    """Read the images of the sites, and build what is the same for all starts."""
    downstream = Downstream(network)
    if task == SEGMENTATION:
        downstream = Segmentation(network)
    data = downstream.data(settings, chosen_sites(settings, sites))
    compute = choose_compute(
        settings.device, settings.precision, settings.threads, settings.deterministic
    )
    return Study(downstream, settings, data, compute, seeds, epochs, distil_epochs)


def train_starts(study: Study, starts: Starts, out: Path, images: int, say: Say) -> FinetuneResult:
    """Train each start over the seeds and write the folder; ``say`` gets each line of progress.

    Args:
        study: the data and settings, which are the same for all starts.
        starts: the starting points.
        out: the folder to write.
        images: the number of test images to draw.
        say: takes a line.

    Raises:
        FedsiloError: weights do not fit, or training diverged. Then nothing is written.
    """
    sizes = ", ".join(f"{count} {name}" for name, count in study.data.sizes().items())
    say(f"{study.settings.dataset}, {', '.join(study.data.sites)}: {sizes} images")
    with noted_operations(say):
        results = tuple(_train_start(study, source, say) for source in starts.named)
    build_folder(out, lambda folder: write_results(folder, study, results, images))
    return FinetuneResult(study, results)


def _train_start(study: Study, source: Source | None, say: Say) -> StartResult:
    """Train one start over the seeds."""
    label, method, headline = SCRATCH, "", study.downstream.headline
    if source:
        label = source.label
    if isinstance(source, RunModel):
        method = source.common.method
    transfer, trained = None, []
    for seed in range(study.seeds):
        network, transfer = start(study, source, seed)
        if transfer and seed == 0:
            say(f"{label}: {transfer.summary()}")
        result = train(study, network, seed)
        trained.append(result)
        value = result.val.get(headline, math.nan)
        say(
            f"{label}, seed {seed}: epoch {result.epoch} of {study.epochs} is best, "
            f"validation {headline} {value:.3f}; {result.seconds:.0f} s"
        )
    return StartResult(label, method, transfer, tuple(trained))


def start(
    study: Study, source: Source | None, seed: int
) -> tuple[nn.Module, TransferReport | DistilReport | None]:
    """Build a network initialised by ``source`` (None: only by the seed), and report the transfer.

    The seed's values are the same for every start, so starts differ only in the transferred arrays.

    Raises:
        SettingError: no array of the weights fits.
    """
    # Built even for a start with weights, because arrays that do not fit keep the seed's values
    settings = _with_seed(study.settings, seed)
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


def _with_seed(settings: CommonSettings, seed: int) -> CommonSettings:
    """Return settings with the seed of weights and batches; the data keep their own."""
    return replace(settings, seed=derive_seed(seed, "finetune") % 2**31)


def train(study: Study, network: nn.Module, seed: int) -> TrainedSeed:
    """Train a network in place for all epochs and measure the best one on the test images.

    Raises:
        SiteError: training diverged.
    """
    began, task, compute = time.monotonic(), study.downstream, study.compute
    settings, data = _with_seed(study.settings, seed), study.data
    curves: list[tuple[int, str, str, float]] = []
    best_score = None
    # One cosine over all epochs, so that the last epochs take small steps
    course = (network, task.objective(network), data.train, settings, compute)
    losses = cosine_epochs(*course, epochs=study.epochs, purpose="finetune")
    for epoch, loss in enumerate(losses, start=1):
        val = task.measure_split(network, data.val, settings, compute)
        if not math.isfinite(val["loss"]):
            raise SiteError(
                "training diverged, validation loss is not finite: lower 'train.learning-rate'"
            )
        curves.append((epoch, "train", "loss", loss))
        curves += [(epoch, "val", name, value) for name, value in val.items()]
        # The best headline counts, then the lower loss, then the earlier epoch
        score = (val.get(task.headline, -math.inf), -val["loss"])
        if best_score is None or score > best_score:
            best_score, best_epoch, best_val = score, epoch, val
            # Copies, because the next epoch trains the network's own arrays
            best_arrays = {}
            for name, tensor in network.state_dict().items():
                best_arrays[name] = tensor.detach().cpu().clone()
    assert best_score is not None, "there is at least one epoch"
    network.load_state_dict(best_arrays)
    test = task.measure_split(network, data.test, settings, compute)
    seconds = time.monotonic() - began
    return TrainedSeed(seed, best_epoch, best_val, test, tuple(curves), best_arrays, seconds)
