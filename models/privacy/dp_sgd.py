"""DP-SGD (Abadi et al. 2016, algorithm 1): an optimiser step that hides each patient.

Equations:
  (sampling) each sample is in a step's batch with probability q, alone -> poisson_batch
  (clipping) g(x) / max(1, ||g(x)||_2 / C), summed over the batch -> clipped_gradients
  (noise) (sum + N(0, (zC)^2 I)) / L, L the batch's expected size -> noisy_mean

Clipping and noise are in whole numbers: ``models.privacy.release``.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedsilo.models.privacy.gaussian_mechanism import uniforms
from fedsilo.models.privacy.release import Release, apart

Loss = Callable[[Tensor, Tensor], Tensor]
_HELD = 2**25  # numbers of gradients that are held at once
# Of one sample: a sum beyond float32 would be an error, by which one sample would be seen
_LARGEST_LOSS = 1e27
_STEP = 2.0**-53  # between two uniform numbers


def poisson_batch(count: int, rate: float, rng: torch.Generator | None) -> Tensor:
    """Return the numbers of the samples of a batch; it may be empty. With rate 1 it is all.

    ``rng`` is the source, or None for batches that nobody can repeat.
    """
    if rate >= 1:
        return torch.arange(count)
    # These are q 2^53, rounded down, among the numbers k / 2^53: never a share above q
    return torch.nonzero(uniforms(count, rng) + _STEP <= rate).flatten()


class _WithLoss(nn.Module):
    """A network whose forward is a loss, so that its parameters can be exchanged for a moment."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.network = network
        self._loss = loss

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return self._loss(inputs, labels)


def clipped_gradients(
    network: nn.Module,
    loss: Loss,
    inputs: Tensor,
    labels: Tensor,
    release: Release,
    size: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Add up a batch's gradients, each sample's clipped, and its losses.

    Args:
        network: in training mode; its layers keep samples apart (no batch norm).
        loss: the mean loss of inputs (batch, ...) and labels (batch,), computed with ``network``.
        inputs: (batch, ...) float.
        labels: (batch,).
        release: bounds a sample's gradient over all parameters, and says whether each is computed
            apart from the others.
        size: samples whose gradients are in memory at once, or 0 for as many as fit.

    Returns:
        Sums of gradients by parameter, in the release's units, and the sum of losses.
    """
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    if release.alone:
        return _alone(parameters, loss, inputs, labels, release)
    sums = {name: torch.zeros_like(p, dtype=torch.int64) for name, p in parameters.items()}
    total = torch.zeros((), device=inputs.device)
    size = size or max(1, _HELD // max(1, sum(p.numel() for p in parameters.values())))
    for start in range(0, len(labels), size):
        here = slice(start, start + size)
        gradients, losses = _together(network, loss, inputs[here], labels[here])
        for name, gradient in release.sums(gradients).items():
            sums[name] += gradient
        total += _finite(losses).sum()
    return sums, total


def _finite(losses: Tensor) -> Tensor:
    """Return losses as they are added up: bounded, and 0 where they are none."""
    finite = torch.nan_to_num(losses, nan=0.0, posinf=0.0, neginf=0.0)
    return finite.clamp(-_LARGEST_LOSS, _LARGEST_LOSS)


def _alone(
    parameters: Mapping[str, nn.Parameter],
    loss: Loss,
    inputs: Tensor,
    labels: Tensor,
    release: Release,
) -> tuple[dict[str, Tensor], Tensor]:
    """Do what ``clipped_gradients`` does, one sample at a time.

    A sample's gradient is one vector at once: clipped array by array it takes twice the time.
    """
    trained = list(parameters.values())
    sizes = [p.numel() for p in trained]
    whole = torch.zeros(sum(sizes), dtype=torch.int64, device=inputs.device)
    total = torch.zeros((), device=inputs.device)
    for one in range(len(labels)):
        value = loss(apart(inputs, one), apart(labels, one))
        found = torch.autograd.grad(value, trained, allow_unused=True)
        pairs = zip(found, trained, strict=True)
        parts = [torch.zeros_like(p) if g is None else g for g, p in pairs]
        vector = torch.cat([part.flatten() for part in parts])
        whole += release.sums({"": vector[None]})[""]
        total += _finite(value.detach())
    split = zip(parameters, torch.split(whole, sizes), strict=True)
    return {name: part.reshape(parameters[name].shape) for name, part in split}, total


def _together(
    network: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients (batch, ...) of each sample of a batch, and their losses (batch,)."""
    with_loss = _WithLoss(network, loss)

    def of_sample(values: Mapping[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        result: Tensor = functional_call(with_loss, dict(values), (one[None], label[None]))
        return result

    # Each sample has parameters of its own, equal in value, whose gradients are then the sample's,
    # and a dropout mask of its own. torch.func.grad does the same and imports torch._dynamo for it
    copies = {
        name: p.detach().expand(len(labels), *p.shape).requires_grad_()
        for name, p in with_loss.named_parameters()
        if p.requires_grad
    }
    losses = vmap(of_sample, randomness="different")(copies, inputs, labels)
    found = torch.autograd.grad(losses.sum(), list(copies.values()), allow_unused=True)
    names = [name.removeprefix("network.") for name in copies]
    pairs = zip(names, found, strict=True)
    return {name: g for name, g in pairs if g is not None}, losses.detach()


def noisy_mean(sums: Mapping[str, Tensor], release: Release, expected: float) -> dict[str, Tensor]:
    """Return clipped gradients with noise, as the mean over a batch of the ``expected`` size.

    The batch's real size would tell who is in it, so it is not what the sum is divided by.

    Args:
        sums: of ``clipped_gradients``.
        release: as there.
        expected: the size.

    Returns:
        The gradients, float64, on the CPU.
    """
    return {name: value / expected for name, value in release.with_noise(sums).items()}
