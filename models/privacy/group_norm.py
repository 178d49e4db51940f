"""Group norm in place of batch norm, for training in which samples must not meet.

A batch norm's output for one sample depends on all others, so that no bound on a patient's part
holds. Group norm (Wu and He 2018) normalises within a sample, and has no running statistics.
"""

import math

from torch import nn

_CHANNELS = 8  # of a group; over a map of one place and one channel there is no variance


def with_group_norm(module: nn.Module) -> None:
    """Replace every batch norm in ``module`` by a group norm of as many channels, in place."""
    for name, part in module.named_children():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            channels = part.num_features
            groups = math.gcd(channels, max(1, channels // _CHANNELS))
            setattr(module, name, nn.GroupNorm(groups, channels, eps=part.eps))
        else:
            with_group_norm(part)
