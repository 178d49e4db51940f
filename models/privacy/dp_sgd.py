"""DP-SGD (Abadi et al. 2016, algorithm 1): an optimiser step that hides each patient.

Equations:
  (sampling) each sample is in a step's batch with probability q, alone -> poisson_batch
  (clipping) g(x) / max(1, ||g(x)||_2 / C), summed over the batch -> clipped_gradients
  (noise) (sum + N(0, (zC)^2 I)) / L, L the batch's expected size -> noisy_mean
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedsilo.models.privacy.gaussian_mechanism import normals, uniforms

Loss = Callable[[Tensor, Tensor], Tensor]
_HELD = 2**26  # numbers of gradients that are held at once
# Of one sample: a sum beyond float32 would be an error, by which one sample would be seen
_LARGEST_LOSS = 1e27


def poisson_batch(count: int, rate: float, rng: torch.Generator | None) -> Tensor:
    """Return the numbers of the samples of a batch; it may be empty. With rate 1 it is all.

    ``rng`` is the source, or None for batches that nobody can repeat.
    """
    if rate >= 1:
        return torch.arange(count)
    return torch.nonzero(uniforms(count, rng) < rate).flatten()


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
    network: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor, clip_norm: float, size: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the sum of a batch's gradients, each sample's clipped, and the sum of its losses.

    Args:
        network: in training mode; its layers keep samples apart (no batch norm).
        loss: the mean loss of inputs (batch, ...) and labels (batch,), computed with ``network``.
        inputs: (batch, ...) float.
        labels: (batch,).
        clip_norm: C, the largest L2 norm of one sample's gradient over all parameters.
        size: samples whose gradients are in memory at once, or 0 for as many as fit.
    """
    with_loss = _WithLoss(network, loss)
    parameters = {n: p.detach() for n, p in with_loss.named_parameters() if p.requires_grad}
    numbers = sum(p.numel() for p in parameters.values())
    size = size or max(1, _HELD // max(1, numbers))

    def of_sample(values: Mapping[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        result: Tensor = functional_call(with_loss, dict(values), (one[None], label[None]))
        return result

    # Each sample has parameters of its own, equal in value, whose gradients are then the sample's,
    # and a dropout mask of its own. torch.func.grad does the same and imports torch._dynamo for it
    losses_of = vmap(of_sample, randomness="different")
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    total = torch.zeros((), device=inputs.device)
    for part in range(0, len(labels), size):
        own, truth = inputs[part : part + size], labels[part : part + size]
        copies = {n: p.expand(len(truth), *p.shape).requires_grad_() for n, p in parameters.items()}
        losses = losses_of(copies, own, truth)
        found = torch.autograd.grad(losses.sum(), list(copies.values()), allow_unused=True)
        gradients = {n: g for n, g in zip(copies, found, strict=True) if g is not None}
        for name, gradient in _clipped(gradients, clip_norm).items():
            sums[name] += gradient
        total += _finite(losses.detach()).clamp(-_LARGEST_LOSS, _LARGEST_LOSS).sum()
    return {name.removeprefix("network."): value for name, value in sums.items()}, total


def _clipped(gradients: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
    """Return the sums over the samples of gradients (batch, ...), each clipped.

    In float32 also under autocast: a sum that is rounded to bf16 moves by more than C with a
    sample. What overflows counts as 0: by a value that is not finite one sample would be seen.
    """
    with torch.autocast(next(iter(gradients.values())).device.type, enabled=False):
        finite = {name: _finite(gradient.float()) for name, gradient in gradients.items()}
        each = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in finite.values()]
        norms = torch.linalg.vector_norm(torch.stack(each), dim=0)
        scales = (clip_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
        return {n: torch.einsum("b,b...->...", scales, g) for n, g in finite.items()}


def _finite(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def noisy_mean(
    sums: Mapping[str, Tensor],
    clip_norm: float,
    noise: float,
    expected: float,
    rng: torch.Generator | None,
) -> dict[str, Tensor]:
    """Return clipped gradients with noise, as the mean over a batch of the ``expected`` size.

    The batch's real size would tell who is in it, so it is not what the sum is divided by.
    ``rng`` is the noise's source, or None for noise that nobody can repeat.
    """
    return {
        name: (value + (noise * clip_norm * normals(value.shape, rng)).to(value)) / expected
        for name, value in sorted(sums.items())
    }
