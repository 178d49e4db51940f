"""Differential privacy before a run: which noise a budget buys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Unpack

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import counted
from fedsilo.server_app.run.arguments import Changes, run_sources, several

if TYPE_CHECKING:
    from fedsilo.models.contract.settings import CommonSettings
    from fedsilo.models.privacy.accountant import Releases


def plan(
    experiment: str,
    *,
    samples: Sequence[int],
    epsilon: Sequence[float] = (1.0, 2.0, 5.0, 10.0),
    delta: float = 1e-5,
    **sources: Unpack[Changes],
) -> Iterator[str]:
    """Tell which noise an experiment needs for a budget.

    A site spends epsilon for each optimiser step, for its label counts, and for the measurements
    of each round that has some and of the end. The smallest site needs the most noise.

    Yields:
        A line for each number of training samples and budget, with the settings to set.

    Raises:
        SettingError: the experiment is unknown, or a number cannot be.
    """
    from fedsilo.server_app.run.planning import planned_settings

    common = planned_settings(experiment, run_sources(sources)).common
    samples, epsilon = several(samples), several(epsilon)
    possible = min(samples, default=0) > 0 and all(0 < one < math.inf for one in epsilon)
    if not possible or not epsilon:
        raise SettingError("--samples and --epsilon must be numbers above 0: name at least one")
    if not 0 < delta < 1:
        raise SettingError(f"--delta is {delta:g}; it must be above 0 and below 1, such as 1e-05")
    for count in sorted(set(samples), reverse=True):
        yield from _plan_of(common, count, epsilon, delta)


def _plan_of(
    common: CommonSettings, count: int, budgets: Sequence[float], delta: float
) -> Iterator[str]:
    from fedsilo.models.privacy.accountant import noise_for

    rate = min(1.0, common.batch_size / count)
    steps = common.rounds * (common.local_steps or common.local_epochs * math.ceil(1 / rate))
    measured = sum(map(common.measures_in, range(1, common.rounds + 1)))
    statistics = 2 + measured  # label counts, and the measurements of the end
    yield (
        f"{counted(count, 'training sample')}: {counted(steps, 'step')} in "
        f"{counted(common.rounds, 'round')}, each with "
        f"{'all samples' if rate == 1 else f'{rate:.3g} of the samples'}; {statistics} releases of "
        "counts and measurements at a hospital"
    )

    def made(noise: float) -> Releases:
        spent = {(noise, rate): steps}
        kind = common.statistics_noise or noise, 1.0
        return spent | {kind: spent.get(kind, 0) + statistics}

    for budget in budgets:
        noise = noise_for(budget, delta, made)
        yield (
            f"  epsilon {budget:g} at delta {delta:g}: --set sample-clip-norm=1 --set "
            f"noise-multiplier={math.ceil(noise * 100) / 100:g}"
        )
