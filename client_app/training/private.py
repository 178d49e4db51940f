"""DP-SGD: Poisson-sampled batches and noisy clipped gradients in place of the usual ones."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp import GradScaler

from fedsilo.client_app.training.compute import Compute
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.models.privacy.dp_sgd import Loss, clipped_gradients, noisy_mean, poisson_batch
from fedsilo.models.privacy.release import Release


@dataclass(frozen=True)
class PrivateTraining:
    """The mechanism of one DP-SGD training, whose epsilon was already charged to the ledger."""

    settings: CommonSettings  # clip norm C, noise multiplier z and the length
    # The reported number of training samples; the real one would reveal who is there
    reported: int
    release: Release  # bounds each gradient, and has been paid for
    sampling: torch.Generator | None  # draws the batches; None for the operating system

    @property
    def rate(self) -> float:
        """The probability q that a sample is in a batch; see ``private_rate``."""
        return private_rate(self.settings, self.reported)

    def steps(self) -> int:
        """Return the number of optimiser steps, which follows from the reported sample count."""
        return private_steps(self.settings, self.reported)

    def plan(self, count: int) -> Iterator[list[Tensor]]:
        """Yield the passes of a private training over ``count`` samples.

        A pass is a list of batches, each a tensor of sample indices. Each sample is in each batch
        with probability ``rate``, independently, so batches differ in size and may be empty. A pass
        has 1 / ``rate`` batches, rounded up. All passes together have ``steps()`` batches, so the
        last pass may have fewer.
        """
        # Poisson batches differ in size, so an epoch has 1 / q batches on average
        left, per_epoch = self.steps(), math.ceil(1 / self.rate)
        while left > 0:
            steps = min(left, per_epoch)
            left -= steps
            # DP-SGD's accounting assumes independent draws, not a shuffled pass
            yield [poisson_batch(count, self.rate, self.sampling) for _ in range(steps)]

    def add_gradients(
        self,
        network: SiteNetwork,
        objective: Loss,
        inputs: Tensor,
        labels: Tensor,
        settings: CommonSettings,
        compute: Compute,
        penalty: Callable[[], Tensor] | None = None,
        scaler: GradScaler | None = None,
    ) -> Tensor:
        """Set the parameters' ``grad`` to a noisy mean of clipped gradients; return the mean loss.

        The gradient of each sample is clipped, the gradients are added up, and noise is added to
        the sums. The sums are divided by the expected batch size, because the real batch size is
        private. Each call uses up one noisy answer whose epsilon was charged before.

        Args:
            network: the network whose gradients are set.
            objective: maps inputs and labels to a mean loss.
            inputs: the batch, on the device. With an empty batch, the gradients consist only of
                noise.
            labels: classes (batch,), on the device.
            settings: 'train.micro-batch' is the number of samples computed at a time; a real
                hospital always computes them one by one.
            compute: the device and the precision.
            penalty: returns a term that depends only on the parameters; None for no penalty. The
                term reveals nothing about a patient, so its gradient gets no clipping and no noise.
            scaler: ignored, and always None, because 'fp16' is refused in private runs.

        Returns:
            The mean loss over the real batch (0 for an empty batch) plus the penalty, a detached
            scalar. A sample's loss that is not finite counts as 0.

        Raises:
            RuntimeError: more calls were made than were charged, which is a bug in the caller.
        """
        parameters, size = dict(network.named_parameters()), settings.micro_batch
        with compute.autocast():
            inputs = float_inputs(inputs)
            found = clipped_gradients(network, objective, inputs, labels, self.release, size)
        sums, loss = found
        for name, gradient in noisy_mean(sums, self.release, self.rate * self.reported).items():
            parameters[name].grad = gradient.to(parameters[name])
        mean = loss / max(1, len(labels))
        if penalty:
            term = penalty()
            term.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
            mean = mean + term.detach()
        return mean


def private_rate(settings: CommonSettings, reported: int) -> float:
    """Return the probability that a sample is in a private batch: batch size / reported, at most 1.

    The number of ``reported`` samples, which is public, takes the place of the true number.
    """
    return min(1.0, settings.batch_size / reported)


def private_steps(settings: CommonSettings, reported: int) -> int:
    """Return the number of optimiser steps in a private training.

    The number is 'train.local-steps'. If that is 0, it is 'train.local-epochs' times the number of
    batches in an epoch, which is ``reported`` divided by the batch size and rounded up, but at
    least 1. Here ``reported`` is the public number of training samples, because the true number is
    private.
    """
    per_epoch = max(1, math.ceil(reported / settings.batch_size))
    return settings.local_steps or settings.local_epochs * per_epoch
