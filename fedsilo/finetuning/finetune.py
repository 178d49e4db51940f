"""``fedsilo finetune``: trains the models of runs on a new task, and the same network from scratch.

All networks are trained on the pooled training images of the sites on this machine. The validation
images choose the best epoch, and the test images measure only that epoch.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from torch import nn

from fedsilo.client_app.training.compute import choose_compute, collect_unrepeatable_operations
from fedsilo.core.errors import SiteError
from fedsilo.core.files.atomic_files import build_folder
from fedsilo.core.seeding import derive_seed
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.finetuning.finetune_request import SCRATCH, SEGMENTATION, RunModel, Source, Starts
from fedsilo.finetuning.finetune_results import FinetuneResult, StartResult, write_results
from fedsilo.finetuning.finetune_settings import accepts_weights
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
    """Read the images, and build the study: all that the trainings to be compared have in common.

    An empty ``sites`` means all. ``seeds`` is the number of trainings per starting point.
    ``distil_epochs`` is 0 without distillation.

    Raises:
        SettingError: the data set is a table, a site is unknown, or the device does not exist.
        DataError: the images cannot be pooled.
    """
    downstream = Downstream(network)
    if task == SEGMENTATION:
        downstream = Segmentation(network)
    data = downstream.data(settings, chosen_sites(settings, sites))
    compute = choose_compute(
        settings.device, settings.precision, settings.threads, settings.deterministic
    )
    return Study(downstream, settings, data, compute, seeds, epochs, distil_epochs)


def train_starts(study: Study, starts: Starts, out: Path, images: int, say: Say) -> FinetuneResult:
    """Train a network from each starting point with each seed, and write the results to ``out``.

    A starting point has pretrained weights, a run's model or random weights. ``out`` is created
    after the last training. For segmentation, it shows predicted masks of up to ``images`` test
    images.

    Raises:
        FedsiloError: weights do not fit the network, or training diverged.
    """
    sizes = ", ".join(f"{count} {name}" for name, count in study.data.sizes().items())
    say(f"{study.settings.dataset}, {', '.join(study.data.sites)}: {sizes} images")
    with collect_unrepeatable_operations(say):
        results = tuple(_train_start(study, source, say) for source in starts.named)
    build_folder(out, lambda folder: write_results(folder, study, results, images))
    return FinetuneResult(study, results)


def _train_start(study: Study, source: Source | None, say: Say) -> StartResult:
    """Train networks that start from the same model or weights, one network per seed.

    The result has the best epoch and the metrics of each seed. ``source`` None means random initial
    weights. ``say`` gets a line after each training.
    """
    label, method, headline = SCRATCH, "", study.downstream.headline
    if source:
        label = source.label
    if isinstance(source, RunModel):
        method = source.common.method
    transfer, trained = None, []
    for seed in range(study.seeds):
        network, transfer = build_start(study, source, seed)
        if transfer and seed == 0:
            say(f"{label}: {transfer.summary()}")
        result = train_seed(study, network, seed)
        trained.append(result)
        value = result.val.get(headline, math.nan)
        say(
            f"{label}, seed {seed}: epoch {result.epoch} of {study.epochs} is best, "
            f"validation {headline} {value:.3f}; {result.seconds:.0f} s"
        )
    return StartResult(label, method, transfer, tuple(trained))


def build_start(
    study: Study, source: Source | None, seed: int
) -> tuple[nn.Module, TransferReport | DistilReport | None]:
    """Build the network for one training, with the weights from which the training starts.

    All arrays are initialised from ``seed``. Those of ``source`` that fit then replace them. If a
    run's ViT does not fit, the network first learns to predict its output. A report on this is
    returned, None without a ``source``.

    Raises:
        FedsiloError: no array fits.
    """
    # Built even for a start with weights, because arrays that do not fit keep the seed's values
    settings = _with_seed(study.settings, seed)
    network = study.downstream.build(settings, study.data.shape)
    if source is None:
        return study.compute.place(network), None
    if isinstance(source, RunModel) and not accepts_weights(study.downstream.network, source):
        learner, compute = cast(Segmenter, study.compute.place(network)), study.compute
        report = distil(learner, source, study.data.train, settings, compute, study.distil_epochs)
        return learner, report
    classes = (study.data.classes, study.data.shape.outputs)
    taken = transfer(study.downstream.trunk(network), source, settings, classes)
    network.requires_grad_(True)
    return study.compute.place(network), taken


def _with_seed(settings: CommonSettings, seed: int) -> CommonSettings:
    """Return the settings with 'seed' derived from ``seed``, for initial weights and batches.

    The split of the data stays the same, because the images have already been read.
    """
    return replace(settings, seed=derive_seed(seed, "finetune") % 2**31)


def train_seed(study: Study, network: nn.Module, seed: int) -> TrainedSeed:
    """Train a network in place for all epochs, and return the results of its best epoch.

    The best epoch has the highest validation value of the task's main metric, accuracy or Dice. The
    network gets that epoch's arrays at the end, and is measured on the test images.

    Raises:
        SiteError: training diverged, so that the validation loss is not finite.
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
        for name, value in val.items():
            curves.append((epoch, "val", name, value))
        # Tuples compare by the headline first, and by the loss only if the headlines are equal. A
        # metric that the validation images do not define loses against every defined one
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
