"""Group norm in place of batch norm, for training in which samples must not meet.

The output of batch norm for one sample depends on all samples of the batch, so that no bound on one
patient's influence holds. Group norm (Wu and He 2018) normalises within a sample and has no running
statistics.
"""

import math

from torch import nn

# Channels per group. A map of one place with one channel per group would have no variance
_CHANNELS = 8


def with_group_norm(module: nn.Module) -> None:
    """Replace every batch norm in ``module``, in place, by a group norm of the same channels."""
    for name, part in module.named_children():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            channels = part.num_features
            # The groups must divide the channels, and the greatest common divisor does
            groups = math.gcd(channels, max(1, channels // _CHANNELS))
            setattr(module, name, nn.GroupNorm(groups, channels, eps=part.eps))
        else:
            with_group_norm(part)
