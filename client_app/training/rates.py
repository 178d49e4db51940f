"""The learning rate of each step, from PyTorch's own schedulers over the steps of all rounds.

The position of a step follows from its round. So a site that joins late, or continues after a
crash, has the same rates as other sites, and no state of a scheduler is stored or sent. Sites with
more samples take more steps per round, but all have the same rates at the start of each round.
"""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count, islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from fedsilo.client_app.training.optimisers import eager
from fedsilo.core.errors import SettingError
from fedsilo.core.files.yaml_text import parse_structure
from fedsilo.core.one_line import join_names, one_line
from fedsilo.core.settings.common_settings import CommonSettings

# A run may set only these arguments; the others follow from its rounds and 'train.learning-rate'
_ARGUMENTS = {
    "constant": (),
    "cosine": ("eta_min",),
    "step": ("step_size", "gamma"),
    "one-cycle": ("pct_start", "anneal_strategy", "div_factor", "final_div_factor", "three_phase"),
}
_EXAMPLES = {"cosine": "{eta_min: 1e-5}", "step": "{step_size: 10, gamma: 0.1}"}
_TRIED = 1000  # the most rounds to try


def is_scheduled(settings: CommonSettings) -> bool:
    """Tell whether the learning rate has a schedule or a warm-up."""
    return settings.schedule != "constant" or settings.warm_up > 0


def rate_setter(
    optimisers: Sequence[Optimizer], settings: CommonSettings, before: int, total: int
) -> Callable[[], None] | None:
    """Return a function that sets the learning rates before each step; None for constant rates.

    Each call sets the rates of the next step. All initial rates are multiplied by the same factor:

    - With a schedule (``total`` above 0) the factor comes from the schedule. After its last step, a
      call raises StopIteration.
    - With 'train.rate-decay' the factor is 1 / sqrt(n) for step n, which counts from 1 over all
      rounds.

    Args:
        optimisers: the network's optimiser, and all other optimisers that step together with it.
        settings: the schedule or decay of the learning rate.
        before: the number of steps that the site has taken in earlier rounds. The function starts
            with the step after them.
        total: the number of steps in all rounds; 0 without a schedule.
    """
    rates = []
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            rates.append((group, float(group["lr"])))
    if total:
        # One factor per step of the whole run; the steps of earlier rounds are skipped
        factors = islice(_factors(settings, total // settings.rounds), before, None)

        def follow() -> None:
            factor = next(factors)
            for group, rate in rates:
                group["lr"] = rate * factor

        return follow
    if settings.rate_decay == "none":
        return None
    steps = count(before + 1)

    def decay() -> None:
        root = math.sqrt(next(steps))
        for group, rate in rates:
            group["lr"] = rate / root

    return decay


@lru_cache(maxsize=32)  # a simulation's sites need the same factors in each round
def _factors(settings: CommonSettings, steps: int) -> Sequence[float]:
    """Return the learning rate of each step in all rounds, as a factor of 'train.learning-rate'.

    ``steps`` is the number of steps in a round. The result is cached.
    """
    return array("d", (rate / settings.learning_rate for rate in _rates(settings, steps)))


def _rates(settings: CommonSettings, steps: int) -> Iterator[float]:
    """Yield the learning rate of each step in all rounds, as PyTorch's scheduler computes it.

    There are ``steps`` rates per round.

    Args:
        settings: the schedule and the number of rounds.
        steps: the number of steps per round.
    """
    rate = settings.learning_rate
    optimiser = eager(torch.optim.SGD)([nn.Parameter(torch.zeros(()))], lr=rate)
    scheduler = _scheduler(optimiser, settings, steps)
    for _ in range(settings.rounds * steps):
        yield float(optimiser.param_groups[0]["lr"])
        optimiser.step()  # without gradients, because the scheduler warns if no step was taken
        scheduler.step()


def _scheduler(
    optimiser: Optimizer, settings: CommonSettings, steps: int
) -> lr_scheduler.LRScheduler:
    """Build the run's PyTorch scheduler for ``steps`` steps per round.

    The run must have a schedule or a warm-up. A linear warm-up comes first, and the step after it
    has the full learning rate. If 'train.warm-up' is below 1, it is a share of all rounds.
    Otherwise it is a number of rounds. The ``step_size`` of the step schedule is also a number of
    rounds.
    """
    rounds, warm_up = settings.rounds, settings.warm_up
    if warm_up < 1:  # a share of all rounds; a larger number counts rounds
        warm_up *= rounds
    # Schedulers count optimiser steps, not rounds
    warm_up = round(warm_up * steps)
    total = rounds * steps
    schedulers: list[lr_scheduler.LRScheduler] = []
    if warm_up:
        schedulers.append(lr_scheduler.LinearLR(optimiser, 1 / (warm_up + 1), 1.0, warm_up))
    arguments = _arguments(settings.schedule, settings.schedule_arguments)
    if settings.schedule == "one-cycle":
        cycle = lr_scheduler.OneCycleLR(
            optimiser, settings.learning_rate, total, cycle_momentum=False, **arguments
        )
        schedulers.append(cycle)
    elif settings.schedule == "cosine":
        left = max(1, total - warm_up)
        schedulers.append(lr_scheduler.CosineAnnealingLR(optimiser, left, **arguments))
    elif settings.schedule == "step":
        size = round(arguments.pop("step_size") * steps)
        schedulers.append(lr_scheduler.StepLR(optimiser, size, **arguments))
    if len(schedulers) == 1:
        return schedulers[0]
    return lr_scheduler.SequentialLR(optimiser, schedulers, [warm_up])


def _arguments(schedule: str, text: str) -> dict[str, Any]:
    """Read 'train.schedule-arguments' as keyword arguments for the schedule, and check their names.

    Args:
        schedule: the name of the schedule.
        text: the value of the setting, such as "{pct_start: 0.3}". The numbers are not checked.

    Raises:
        SettingError: the text is malformed, or names an argument that this schedule does not take.
    """
    chosen: dict[str, Any] = parse_structure(
        "train.schedule-arguments", text, _EXAMPLES.get(schedule, "{pct_start: 0.3}")
    )
    unknown = sorted(map(str, chosen.keys() - {*_ARGUMENTS[schedule]}))
    if unknown:
        known = join_names(_ARGUMENTS[schedule]) or "none"
        raise SettingError(
            f"'train.schedule-arguments' has {join_names(unknown)}, but schedule '{schedule}' "
            f"takes {known}: remove what it does not take"
        )
    return chosen


def check_schedule(settings: CommonSettings) -> None:
    """Check that the learning rate's schedule can be built, and fits the other settings.

    A schedule or a warm-up excludes 'train.rate-decay', and the warm-up must be shorter than the
    run. If there is neither a schedule nor a warm-up, only 'train.schedule-arguments' are checked.

    Raises:
        SettingError: the arguments are malformed or unknown to the schedule, or the schedule cannot
            be used. The error gives the first reason and the setting to change.
    """
    arguments = _arguments(settings.schedule, settings.schedule_arguments)
    if is_scheduled(settings):
        reason = next(_reasons_against(settings, arguments), "")
        if reason:
            raise SettingError(reason)


def _reasons_against(settings: CommonSettings, arguments: dict[str, Any]) -> Iterator[str]:
    """Yield each reason why a schedule cannot be used; the user gets only the first reason.

    The reasons are, in this order:

    - The run also has 'train.rate-decay'.
    - Schedule 'one-cycle', which warms up by itself, also has 'train.warm-up'.
    - 'train.warm-up' is at least the number of rounds.
    - Schedule 'step' has no ``step_size``, or one that is not above 0.
    - PyTorch refuses the arguments, or they give a rate that is negative or not finite. Only the
      first 1,000 rounds are checked, with one rate each.

    ``arguments`` are the parsed 'train.schedule-arguments'.
    """
    if settings.rate_decay != "none":
        yield (
            "'train.rate-decay' and a schedule both set the learning rate: set 'train.rate-decay' "
            "to 'none', or remove 'train.schedule' and 'train.warm-up'"
        )
    if settings.schedule == "one-cycle" and settings.warm_up:
        yield (
            "schedule 'one-cycle' warms up by itself: remove 'train.warm-up', or set pct_start, "
            "its share, in 'train.schedule-arguments'"
        )
    if settings.warm_up >= settings.rounds:
        yield (
            f"setting 'train.warm-up' is {settings.warm_up:g}, but there are {settings.rounds} "
            "rounds: lower it below 'rounds'"
        )
    size = arguments.get("step_size", 0)
    if settings.schedule == "step" and isinstance(size, int | float) and size <= 0:
        yield (
            "schedule 'step' needs the rounds of a step, above 0: set 'train.schedule-arguments' "
            f"to {_EXAMPLES['step']}"
        )
    try:
        rates = list(islice(_rates(settings, 1), _TRIED))
        usable = all(math.isfinite(rate) and rate >= 0 for rate in rates)
    except (TypeError, ValueError, ArithmeticError) as error:
        reason, usable = one_line(error, 200), False
    else:
        reason = "a learning rate would be negative or infinite"
    if not usable:
        yield (
            f"schedule '{settings.schedule}' cannot be made ({reason}): change "
            "'train.schedule-arguments'"
        )
