"""Epochs that span several rounds, counted in optimiser steps (Fed-Align-CL, algorithm 1).

At a site with m samples an epoch has Q steps (``epoch-steps``) of m/Q samples each. A round has tau
of these steps (``pace``).
"""

import math

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping, defaults

_LEAST = 2  # samples in a step, because batch norm has no variance over one sample


def check_pace(settings: CommonSettings) -> None:
    """Check the settings that decide the length of a round, and 'train.micro-batch'.

    If 'train.epoch-steps' is above 0, it is the number of optimiser steps in an epoch, and a round
    has 'train.pace' of them. If it is 0, 'train.local-epochs' or 'train.local-steps' decides.

    Raises:
        SettingError: in one of these cases:

            - 'train.micro-batch' is 1, for which batch norm has no variance.
            - 'train.epoch-steps' is 0, but 'train.pace' is not its default.
            - 'train.epoch-steps' is above 0, but 'train.local-epochs', 'train.local-steps' or
              'train.batch-size' is not its default.
            - 'train.pace' does not divide 'train.epoch-steps'.
    """
    values, usual = as_mapping(settings), defaults(CommonSettings)
    if settings.micro_batch == 1:
        raise SettingError(
            "setting 'train.micro-batch' must be 0 or at least 2, but is 1: batch norm has no "
            "variance over one sample; set it to 0 for whole batches"
        )
    # The paced and the usual way to count steps exclude each other
    if not settings.epoch_steps:
        if settings.pace != usual["train.pace"]:
            raise SettingError(
                "setting 'train.pace' has no effect while 'train.epoch-steps' is 0: set both"
            )
        return
    for key in ("train.local-epochs", "train.local-steps", "train.batch-size"):
        if values[key] != usual[key]:
            raise SettingError(
                f"setting '{key}' has no effect with 'train.epoch-steps', where a round is "
                "'train.pace' steps of samples/epoch-steps each: remove one of them"
            )
    if settings.epoch_steps % settings.pace:
        divisors = []
        for number in range(1, settings.epoch_steps + 1):
            if settings.epoch_steps % number == 0:
                divisors.append(str(number))
        raise SettingError(
            f"setting 'train.pace' must divide 'train.epoch-steps' ({settings.epoch_steps}), but "
            f"is {settings.pace}: choose one of {', '.join(divisors)}"
        )


def epoch_of(round_: int, settings: CommonSettings) -> int:
    """Return the epoch, counted from 0, to which round ``round_``, counted from 1, belongs."""
    # Steps before the round, divided by the steps of an epoch; hence the - 1
    return (round_ - 1) * settings.pace // settings.epoch_steps


def begins_epoch(round_: int, settings: CommonSettings) -> bool:
    """Tell whether ``round_``, from 1, is the first round of its epoch."""
    return (round_ - 1) * settings.pace % settings.epoch_steps == 0


def ends_epoch(round_: int, settings: CommonSettings) -> bool:
    """Tell whether ``round_``, from 1, is the last round of its epoch."""
    return begins_epoch(round_ + 1, settings)


def batch_of(samples: int, settings: CommonSettings) -> int:
    """Return the batch size at a site with ``samples`` training samples.

    The size is ``samples`` divided by 'train.epoch-steps' and rounded down, but at least 2.
    """
    return max(samples // settings.epoch_steps, _LEAST)


def steps_of_round(settings: CommonSettings, samples: int) -> int:
    """Return the number of optimiser steps per round at a site with ``samples`` training samples.

    The first of these settings that is above 0 decides:

    - 'train.epoch-steps': the number is 'train.pace'.
    - 'train.local-steps': the number is this setting.
    - 'train.local-epochs': the number is this setting times the batches in an epoch. An incomplete
      last batch counts.
    """
    if settings.epoch_steps:
        return settings.pace
    return settings.local_steps or settings.local_epochs * math.ceil(samples / settings.batch_size)
