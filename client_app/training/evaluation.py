"""Measure a network on a split: predictions, with or without MC dropout, and metrics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedsilo.client_app.training.compute import Compute
from fedsilo.core.metric_names import BINS, CERTAINTY, RELIABILITY
from fedsilo.core.seeding import seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.maths.dirichlet import vacuity
from fedsilo.models.maths.mc_dropout import (
    mc_dropout_mean,
    only_dropout_active,
)
from fedsilo.models.measures.classification_metrics import bin_counts
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.models.privacy.release import copy_alone
from fedsilo.models.tasks.task import Task, task_of

_BATCH = 500  # the most inputs of a batch
_NUMBERS = 2**24  # the most numbers in a batch, so that large images use smaller batches
_IMAGES, _IN_CACHE = 128, 2**22  # the most images, and numbers in them, that a CPU encodes at once


class Probe(Protocol):
    """A method's own metrics, computed from tokens in addition to accuracy, loss and entropy."""

    def see(self, tokens: Tensor) -> None:
        """Record a batch of tokens (batch, l, c)."""
        ...

    def values(self) -> dict[str, float]:
        """Return the metrics by name."""
        ...


class Probes(list[Probe]):
    """Several probes combined into one."""

    def see(self, tokens: Tensor) -> None:
        """Pass a batch of tokens (batch, l, c) to each probe."""
        for one in self:
            one.see(tokens)

    def values(self) -> dict[str, float]:
        """Return the metrics of all probes."""
        values = {}
        for one in self:
            values.update(one.values())
        return values


@dataclass(frozen=True)
class Measured:
    """A network to measure, with the names of its metrics and more values to compute."""

    network: SiteNetwork  # must be on the compute device
    # Metric -> its name in the reply; other metrics are left out. None for all, under their names
    names: Mapping[str, str] | None = None
    # Returns a probe for a split; the probe sees the tokens and adds its own metrics
    probe: Callable[[str], Probe] | None = None
    # Maps tokens (batch, l, c) to further values of each sample's prediction besides its class
    # probabilities: name -> (batch,) on the CPU
    of_samples: Callable[[Tensor], dict[str, Tensor]] | None = None
    # Only samples of these strata (``Task.strata``) are measured; None for all
    within: Tensor | None = None


def measure(
    network: SiteNetwork,
    split: Split,
    settings: CommonSettings,
    compute: Compute,
    key: tuple[int | str, ...],
    probe: Probe | None = None,
    counts_from: int | None = None,
    task: Task | None = None,
) -> dict[str, float]:
    """Measure a network on ``split``, and return its metrics by name.

    Predictions are the mean over 'train.mc-passes' passes with dropout. With 0 there is one pass
    without dropout. The task, such as classification, determines the predictions and the metrics.
    Its further metrics, such as counts by class, are included only with ``counts_from``.

    Args:
        network: placed on the compute device.
        split: the samples, at least one.
        settings: the seed, the number of passes, and the task.
        compute: the device and the precision.
        key: values that the random numbers of dropout depend on besides the seed, such as (round,
            site).
        probe: sees the tokens (the encoder's outputs) of every batch, and its metrics are added.
            With None there is no probe.
        counts_from: the fewest samples behind each further metric. With None there are no further
            metrics.
        task: the task, with the scale of a numeric outcome. None means the task in ``settings``.
    """
    batches = torch.split(split.inputs, batch_size(split.inputs[:1].numel()))
    task = task or task_of(settings)
    predictions = predict_batches(network, batches, settings, compute, key, probe, task)
    metrics = task.metrics(predictions, split.labels)
    if counts_from is not None:
        metrics |= task.counts(predictions, split.labels, counts_from)
    if probe:
        metrics |= probe.values()
    return metrics


def measured_parts(
    network: SiteNetwork,
    split: Split,
    settings: CommonSettings,
    compute: Compute,
    key: tuple[int | str, ...],
    task: Task | None = None,
) -> dict[str, Tensor]:
    """Return each sample's contribution to the metrics that get noise in a private run.

    The result maps a metric to contributions (n,) in [0, 1]. The task determines these metrics and
    their scales. An empty split gives empty tensors. Samples are measured one at a time. In a
    batch, the last bits of an output depend on the batch size, and malicious weights could make the
    predicted class depend on these bits. For the arguments see ``measure``.
    """
    task = task or task_of(settings)
    empty = torch.zeros(0, 2, dtype=torch.float64)
    found = [task.parts(empty, split.labels[:0])]  # a split may have no samples
    if len(split):
        inputs = one_by_one(split.inputs)
        predictions = predict_batches(network, inputs, settings, compute, key, task=task)
        for number in range(len(split)):
            # Each sample in tensors of its own, because the last bits can depend on a batch's size
            found.append(
                task.parts(copy_alone(predictions, number), copy_alone(split.labels, number))
            )
    return {metric: torch.cat([part[metric] for part in found]) for metric in found[0]}


def select_strata(split: Split, strata: Tensor, chosen_strata: Tensor) -> Split:
    """Return a new split with only the samples of the chosen strata, in the order of ``split``.

    A stratum is a group of samples that the task defines, such as those of one class.

    Args:
        split: the samples.
        strata: the number of each sample's stratum, (n,).
        chosen_strata: the numbers of the strata to return, (k,).
    """
    chosen = torch.isin(strata, chosen_strata)
    return Split(split.inputs[chosen], split.labels[chosen])


def batch_size(numbers: int) -> int:
    """Return the number of inputs in a batch, 1 to 500, if each input has ``numbers`` elements."""
    return max(1, min(_BATCH, _NUMBERS // max(numbers, 1)))


def in_batches(inputs: Tensor) -> Sequence[Tensor]:
    """Split inputs (n, ...) into batches that are small enough for memory."""
    return torch.split(inputs, batch_size(inputs[:1].numel()))


def one_by_one(inputs: Tensor) -> Sequence[Tensor]:
    """Split inputs (n, ...) into batches of one sample, each a copy, for private metrics."""
    return [copy_alone(inputs, number) for number in range(len(inputs))]


def predict_batches(
    network: SiteNetwork,
    batches: Iterable[Tensor],
    settings: CommonSettings,
    compute: Compute,
    key: tuple[int | str, ...],
    probe: Probe | None = None,
    task: Task | None = None,
) -> Tensor:
    """Return the task's predictions (n, ...) for inputs in batches, float64 on the CPU.

    Predictions are the mean over 'train.mc-passes' passes with dropout; 0 means one pass without
    dropout. The batches are consumed one at a time. Other batch sizes give other random draws of
    dropout, and so other predictions.

    Args:
        network: placed on the compute device.
        batches: inputs (batch, ...); at least one batch.
        settings: the seed and 'train.mc-passes'.
        compute: the device and the precision.
        key: values that the random numbers of dropout depend on besides the seed, such as (round,
            site).
        probe: sees the tokens (batch, l, c) of each batch; None for no probe.
        task: the task with the outcome's scale; None for the task of ``settings``.
    """
    task, predictions = task or task_of(settings), []
    with (
        seed_generators(settings.seed, "mc-dropout", *key, device=compute.device),
        torch.no_grad(),
        only_dropout_active(network, settings.mc_passes > 0),
        compute.autocast(),
    ):
        for inputs in batches:
            parts = _in_parts(
                network.encode, inputs, compute
            )  # without the head, because dropout draws there
            tokens = parts[0]
            if len(parts) > 1:  # a single part needs no copy
                tokens = torch.cat(parts)
            if probe:
                probe.see(tokens)
            features = network.features(tokens)
            passes = 1
            if network.has_dropout:
                passes = max(settings.mc_passes, 1)
            mean = mc_dropout_mean(network.classify, features, passes, task.predict)
            predictions.append(mean.cpu())
    return torch.cat(predictions)


def _in_parts(
    function: Callable[[Tensor], Tensor], inputs: Tensor, compute: Compute
) -> list[Tensor]:
    """Apply ``function`` to consecutive parts of ``inputs``; return the results as a list.

    Each part is brought to the device as floats. It has at most 500 inputs, and fewer if an input
    has many elements. Images on a CPU have at most 128 inputs per part, because the activations
    then stay in the CPU's cache.
    """
    numbers = max(1, inputs[:1].numel())
    if compute.device.type == "cpu" and inputs.ndim > 2:
        size = max(1, min(_IMAGES, _IN_CACHE // numbers))
    else:
        size = batch_size(numbers)
    return [function(float_inputs(compute.bring(part))) for part in torch.split(inputs, size)]


def tokens_of(network: SiteNetwork, split: Split, compute: Compute) -> Tensor:
    """Return the tokens (n, l, c) of all samples in a split, float32 on the CPU.

    The network is put into eval mode.
    """
    return over_batches(network, split.inputs, compute, network.encode)


def over_batches(
    network: SiteNetwork, inputs: Tensor, compute: Compute, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply ``function`` to all inputs, part by part, and return all its rows, float32 on the CPU.

    The network is put into eval mode and remains in eval mode. No gradients are computed. Without
    inputs, ``function`` is called once with an empty batch.

    Args:
        network: the network that ``function`` uses.
        inputs: the inputs (n, ...).
        compute: the device and the precision.
        function: maps inputs (batch, ...) to rows (batch, ...).
    """
    network.eval()
    with torch.no_grad(), compute.autocast():
        parts = _in_parts(lambda part: function(part).float().cpu(), inputs, compute)
    return torch.cat(parts)


class EvidenceProbe:
    """Measures the mean vacuity of an evidential network.

    If ``binned``, it also counts right predictions in bins of confidence and of vacuity.
    """

    def __init__(self, network: SiteNetwork, labels: Tensor, binned: bool) -> None:
        self.network = network
        self.labels = labels
        self.binned = binned
        self.alphas: list[Tensor] = []

    def see(self, tokens: Tensor) -> None:
        """Record alpha (batch, classes) for a batch of tokens, from a pass without dropout.

        Without dropout the probe draws no random numbers.
        """
        self.alphas.append(_alpha(self.network, tokens))

    def values(self) -> dict[str, float]:
        """Return the evidential network's metrics over all recorded batches, by name.

        ``vacuity`` is the mean over the samples of a number from 0 to 1, which is high if the
        network has little evidence. If the probe is ``binned``, the samples are also put into 10
        bins of equal width, once by confidence ("reliability") and once by vacuity ("certainty").
        Confidence is the largest expected class probability. A bin, from 0 to 9, has three metrics:

        - ``<family>.<bin>.count`` is the number of samples.
        - ``<family>.<bin>.right`` is the number of correct predictions.
        - ``<family>.<bin>.mean`` is the mean confidence or vacuity, and 0 for an empty bin.
        """
        alphas = torch.cat(self.alphas)
        uncertain = vacuity(alphas)
        metrics = {"vacuity": uncertain.double().mean().item()}
        if not self.binned:
            return metrics
        confidence, predicted = (alphas / alphas.sum(dim=1, keepdim=True)).max(dim=1)
        right = predicted == self.labels
        for name, values in ((RELIABILITY, confidence), (CERTAINTY, uncertain)):
            for key, value in bin_counts(values, right, BINS).items():
                metrics[f"{name}.{key}"] = value
        return metrics


def vacuity_of(network: SiteNetwork, tokens: Tensor) -> dict[str, Tensor]:
    """Return ``{"vacuity": (batch,)}`` for tokens (batch, l, c)."""
    return {"vacuity": vacuity(_alpha(network, tokens))}


def _alpha(network: SiteNetwork, tokens: Tensor) -> Tensor:
    """Return the Dirichlet concentrations (batch, classes) of tokens, computed without dropout."""
    with only_dropout_active(network, dropout=False):
        logits = network.classify(network.features(tokens))
    return logits.float().exp().cpu()
