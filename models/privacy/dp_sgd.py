"""DP-SGD (Abadi et al. 2016, algorithm 1): an optimiser step that hides each patient.

Equations:
  (sampling) each sample is in a step's batch with probability q, alone -> poisson_batch
  (clipping) g(x) / max(1, ||g(x)||_2 / C), summed over the batch -> clipped_gradients
  (noise) (sum + N(0, (zC)^2 I)) / L, L the batch's expected size -> noisy_mean

Clipping and noise use whole numbers, see ``models.privacy.release``. Batch norm is replaced by
group norm (``with_group_norm``): the output of batch norm for one sample depends on all samples of
the batch, so no bound on one patient's influence would hold.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedsilo.models.privacy.gaussian_mechanism import uniforms
from fedsilo.models.privacy.release import Release, copy_alone

Loss = Callable[[Tensor, Tensor], Tensor]
_HELD = 2**25  # numbers of gradients in memory at once
# The largest loss of one sample. A sum beyond float32 would raise an error, which would reveal that
# sample
_LARGEST_LOSS = 1e27
_STEP = 2.0**-53  # distance between two uniform numbers


def poisson_batch(count: int, rate: float, rng: torch.Generator | None) -> Tensor:
    """Draw a batch that contains each of ``count`` samples independently with probability ``rate``.

    Args:
        count: number of samples.
        rate: the probability, above 0. With 1 or more the batch has all samples. Below 1 it is
            rounded down to a multiple of 2^-53, so the batch never costs more epsilon than
            computed.
        rng: the generator, or None for random bits of the operating system.

    Returns:
        Indices of the samples, int64, ascending. There may be none.
    """
    if rate >= 1:
        return torch.arange(count)
    # Uniform numbers are k / 2^53. Exactly floor(q 2^53) of them pass, so the real rate is never
    # above q, the rate in the computation of epsilon. Without the added step one more could pass
    return torch.nonzero(uniforms(count, rng) + _STEP <= rate).flatten()


class _WithLoss(nn.Module):
    """A network whose ``forward`` is the loss, as ``functional_call`` needs it."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.network = network
        self._loss = loss

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean loss of a batch, a scalar."""
        return self._loss(inputs, labels)


def clipped_gradients(
    network: nn.Module,
    loss: Loss,
    inputs: Tensor,
    labels: Tensor,
    release: Release,
    size: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Clip the gradient of each sample in a batch, and add up the gradients and the losses.

    The network's own gradients are not changed. Numbers that are not finite count as 0.

    Args:
        network: the network in training mode. Its layers must not mix samples, as batch norm does.
        loss: the mean loss of inputs (batch, ...) and labels (batch,), computed with ``network``.
        inputs: (batch, ...) float.
        labels: (batch,) int64.
        release: its ``bound`` limits the L2 norm of a sample's gradient over all parameters. If
            ``release.alone``, each sample is a batch of one, and ``size`` is ignored.
        size: number of samples whose gradients are in memory at once. 0 for as many as fit.

    Returns:
        Parameter -> sum of gradients, in whole units of bound / 2^24, int64. Then the sum of
        losses, a scalar.
    """
    parameters = _trained_parameters(network)
    if release.alone:
        return _clip_one_by_one(parameters, loss, inputs, labels, release)
    sums: dict[str, Tensor] = {}
    numbers = 0
    for name, parameter in parameters.items():
        sums[name] = torch.zeros_like(parameter, dtype=torch.int64)
        numbers += parameter.numel()
    total = torch.zeros((), device=inputs.device)
    # Each sample has a gradient as large as the model, so few samples fit into memory at once
    if not size:
        size = max(1, _HELD // max(1, numbers))
    for start in range(0, len(labels), size):
        here = slice(start, start + size)
        gradients, losses = _gradients_per_sample(network, loss, inputs[here], labels[here])
        for name, gradient in release.sums(gradients).items():
            sums[name] += gradient
        total += _finite(losses).sum()
    return sums, total


def _trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    parameters = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            parameters[name] = parameter
    return parameters


def _finite(losses: Tensor) -> Tensor:
    """Clip losses (n,) to -1e27..1e27, and replace NaN and infinite losses by 0."""
    # An infinite sum would show that one sample has such a loss
    finite = torch.nan_to_num(losses, nan=0.0, posinf=0.0, neginf=0.0)
    return finite.clamp(-_LARGEST_LOSS, _LARGEST_LOSS)


def _clip_one_by_one(
    parameters: Mapping[str, nn.Parameter],
    loss: Loss,
    inputs: Tensor,
    labels: Tensor,
    release: Release,
) -> tuple[dict[str, Tensor], Tensor]:
    """Sum clipped gradients and losses, with a forward and backward pass for each sample.

    Each sample is first copied to its own memory. Otherwise its place in the batch could change the
    last bits of its gradient.

    Args:
        parameters: the parameters to train, by name.
        loss: the mean loss of inputs (1, ...) and labels (1,).
        inputs: (batch, ...) float.
        labels: (batch,) int64.
        release: its ``bound`` limits the L2 norm of a sample's gradient over all parameters.

    Returns:
        Parameter -> sum of gradients, in whole units of bound / 2^24, int64. Then the sum of
        losses, a scalar. A loss that is not finite adds 0.
    """
    # The gradient of a sample is joined to one vector, because clipping array by array takes twice
    # the time
    trained = list(parameters.values())
    sizes = [p.numel() for p in trained]
    whole = torch.zeros(sum(sizes), dtype=torch.int64, device=inputs.device)
    total = torch.zeros((), device=inputs.device)
    for one in range(len(labels)):
        value = loss(copy_alone(inputs, one), copy_alone(labels, one))
        # A parameter that the loss does not use has the gradient 0
        gradients = torch.autograd.grad(value, trained, materialize_grads=True)
        vector = torch.cat([gradient.flatten() for gradient in gradients])
        whole += release.sums({"": vector[None]})[""]
        total += _finite(value.detach())
    sums: dict[str, Tensor] = {}
    for name, part in zip(parameters, torch.split(whole, sizes), strict=True):
        sums[name] = part.reshape(parameters[name].shape)
    return sums, total


def _gradients_per_sample(
    network: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute the gradient and the loss of each sample in a batch, in one ``vmap`` pass.

    Each sample has its own dropout mask. The network's own gradients are not changed. ``loss`` gets
    a batch of one for each sample.

    Returns:
        Gradients (batch, ...) by parameter, and the losses (batch,). Parameters that do not affect
        the loss are left out.
    """
    with_loss = _WithLoss(network, loss)

    def of_sample(values: Mapping[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        result: Tensor = functional_call(with_loss, dict(values), (one[None], label[None]))
        return result

    # Each sample gets its own view of the parameters, so the gradient of the sum of losses is
    # one gradient per sample. With "different" randomness each sample has its own dropout mask.
    # torch.func.grad does the same, but imports torch._dynamo, which takes seconds
    copies: dict[str, Tensor] = {}
    for name, parameter in _trained_parameters(with_loss).items():
        views = parameter.detach().expand(len(labels), *parameter.shape)
        copies[name] = views.requires_grad_()
    losses = vmap(of_sample, randomness="different")(copies, inputs, labels)
    found = torch.autograd.grad(losses.sum(), list(copies.values()), allow_unused=True)
    gradients: dict[str, Tensor] = {}
    for name, gradient in zip(copies, found, strict=True):
        if gradient is not None:  # the loss uses this parameter
            gradients[name.removeprefix("network.")] = gradient
    return gradients, losses.detach()


def noisy_mean(sums: Mapping[str, Tensor], release: Release, expected: float) -> dict[str, Tensor]:
    """Add noise to sums of clipped gradients, and divide by the expected batch size.

    The real size is not used, because it depends on which patients are in the data.

    Args:
        sums: the sums from ``clipped_gradients``.
        release: the release that clipped them, which decides the noise. The call uses up one of the
            releases whose epsilon is already paid.
        expected: the sampling rate times the number of samples, above 0.

    Returns:
        Mean gradients by parameter, float64, on the CPU.

    Raises:
        RuntimeError: all paid releases are used up, which is a bug in the calling code.
    """
    return {name: value / expected for name, value in release.with_noise(sums).items()}


# Channels per group. With one channel per group, the variance of a map of one place would be 0
_CHANNELS = 8


def with_group_norm(module: nn.Module) -> None:
    """Replace every batch norm inside ``module``, in place, by a group norm of the same channels.

    Group norm normalises each sample by itself, without running statistics. A group has 8 channels
    if the number of channels is a multiple of 8, otherwise more. Fewer than 8 channels are one
    group. The new norm begins with weights 1 and biases 0. Only ``BatchNorm1d`` and ``BatchNorm2d``
    are replaced. If ``module`` itself is a batch norm, it stays.
    """
    for name, part in module.named_children():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            channels = part.num_features
            # The groups must divide the channels, and the greatest common divisor does
            groups = math.gcd(channels, max(1, channels // _CHANNELS))
            setattr(module, name, nn.GroupNorm(groups, channels, eps=part.eps))
        else:
            with_group_norm(part)
