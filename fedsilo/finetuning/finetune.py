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
    """Read the images, and build the study: everything that all starting points have in common.

    A starting point is a set of weights from which a network is trained. The study holds the task,
    the pooled images of the chosen sites in memory, the settings, the device, and the numbers of
    seeds and epochs. Nothing is trained yet.

    Args:
        task: 'classification' or 'segmentation'.
        network: the name of the network to train.
        settings: the settings of the data, the network and the training.
        sites: the sites whose images are pooled. Empty for all sites of the data set.
        seeds: the number of trainings for each starting point, with seeds 0, 1, ...
        epochs: the epochs of each training.
        distil_epochs: the epochs of distillation. If a starting point is a finished run whose ViT
            does not fit the network, the network first learns to predict the tokens of this ViT. 0
            for no distillation.

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

    The folder is created after the last training, so an error leaves nothing behind.

    Args:
        study: the data and settings, which are the same for all starting points.
        starts: the starting points: pretrained weights, models of runs or random initial weights.
        out: the folder to create.
        images: the number of test images that are drawn with their predicted masks, at most. It has
            an effect only for segmentation.
        say: is called with each line of progress.

    Returns:
        The study, and the result of each starting point, in order.

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
    """Train one network per seed, all from the same starting point, and collect the results.

    Args:
        study: the data, the settings and the number of seeds. The seeds are 0, 1, ...
        source: the model or weights to start from. None for random initial weights.
        say: is called with a line after the training of each seed. Before the first training, it is
            called with a line about the weights that the network received from ``source``.

    Returns:
        The name of the starting point, the report on the weights received, and the best epoch and
        the metrics of each seed.

    Raises:
        FedsiloError: no array of the weights fits the network, or training diverged.
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

    All arrays are first initialised from ``seed``. The arrays of ``source`` that fit then replace
    them. Networks with the same seed therefore differ only in the arrays that they received.

    If ``source`` is a run's ViT whose arrays do not fit the network, nothing is copied. Instead,
    the network's encoder is trained for ``study.distil_epochs`` epochs to predict the ViT's tokens
    (distillation).

    Args:
        study: the task, the data, the settings and the device.
        source: the run's model or the pretrained weights. None for random initial weights.
        seed: the seed of the training.

    Returns:
        The network on the study's device, and the report on the copied arrays or on the
        distillation. Without a ``source``, the report is None.

    Raises:
        FedsiloError: no array of the weights fits, or the weights cannot be loaded.
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

    The best epoch has the highest validation value of the task's headline metric, which is accuracy
    or Dice. A tie is decided by the lower validation loss, then by the earlier epoch. An undefined
    metric is worse than any value. At the end, the network gets the best epoch's arrays, and is
    measured on the test images.

    Raises:
        SiteError: the validation loss of an epoch is not finite, because training diverged.
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
