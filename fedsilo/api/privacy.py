"""Plans differential privacy before a run: the noise that a budget of epsilon needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Unpack

from fedsilo.api.options import Changes, ExperimentName, command, run_sources
from fedsilo.core.arguments import several
from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import format_count

if TYPE_CHECKING:
    from fedsilo.core.settings.common_settings import CommonSettings
    from fedsilo.models.privacy.accountant import Releases


@command
def plan(
    experiment: ExperimentName,
    *,
    samples: Annotated[Sequence[int], "training samples of a site; may be repeated"],
    epsilon: Annotated[Sequence[float], "the budget per patient; may be repeated"] = (
        1.0,
        2.0,
        5.0,
        10.0,
    ),
    delta: Annotated[float, "the delta at which the budget holds"] = 1e-5,
    counts_noise: Annotated[
        float, "the hospital's 'counts-noise' (0: a noise that costs a quarter of the budget)"
    ] = 0.0,
    **sources: Unpack[Changes],
) -> Iterator[str]:
    """Compute the noise that an experiment needs for a budget.

    A site spends epsilon on three things: each optimiser step, each release of metrics, and one
    release of its sample counts. Metrics are released in rounds with evaluation, and once at the
    end. The smallest site needs the most noise. Its lines come last, and have settings that suit
    all sites. Nothing is trained.

    Args:
        experiment: the name of an experiment, or of a method for its default settings.
        samples: the number of training samples of each site to plan for.
        epsilon: the budgets per patient.
        delta: the delta of the budgets, above 0 and below 1.
        counts_noise: the hospital's noise for its sample counts. With 0, the noise is chosen so
            that the counts cost a quarter of the budget.
        sources: changes to the experiment's settings.

    Yields:
        For each different number of samples, the largest first: a line with the numbers of steps
        and releases, then a line for each budget. This line has the settings that meet the budget,
        with the noise multiplier rounded up to two decimals.

    Raises:
        SettingError: the experiment is unknown, ``samples`` or ``epsilon`` is empty, or a number is
            out of range.
    """
    from fedsilo.engines.planning import planned_settings

    common = planned_settings(experiment, run_sources(sources)).common
    samples, epsilon = several(samples), several(epsilon)
    # NaN fails each of these comparisons, so it is refused too
    possible = min(samples, default=0) > 0 and all(0 < one < math.inf for one in epsilon)
    if not possible or not epsilon:
        raise SettingError("--samples and --epsilon must be numbers above 0: name at least one")
    if not 0 < delta < 1:
        raise SettingError(f"--delta must be above 0 and below 1, such as 1e-05, but is {delta:g}")
    if not 0 <= counts_noise < math.inf:
        raise SettingError(f"--counts-noise must be 0 or a number above 0, but is {counts_noise}")
    for count in sorted(set(samples), reverse=True):
        yield from _plan_site(common, count, epsilon, delta, counts_noise)


def _plan_site(
    common: CommonSettings,
    count: int,
    budgets: Sequence[float],
    delta: float,
    counts_noise: float,
) -> Iterator[str]:
    """Yield the lines of ``plan`` for one site.

    The first line has the number of optimiser steps, the share of the site's samples that a step
    uses, and the number of releases of metrics. Then each budget has a line with the settings that
    meet it. The noise multiplier is the smallest one that meets the budget, rounded up to 0.01.

    Args:
        common: the settings of the experiment.
        count: the number of training samples of the site.
        budgets: the epsilons to plan for.
        delta: the delta of all budgets.
        counts_noise: the noise of the site's sample counts. With 0, each budget gets the noise with
            which releasing the counts costs a quarter of the budget.
    """
    from fedsilo.models.privacy.accountant import counts_noise_for, noise_for

    # Poisson sampling: each sample is in a step with this probability, so that a batch has
    # 'train.batch-size' samples on average
    rate = min(1.0, common.batch_size / count)
    steps = common.rounds * (common.local_steps or common.local_epochs * math.ceil(1 / rate))
    measured = sum(map(common.measures_in, range(1, common.rounds + 1)))
    # The metrics at the end are one more release
    statistics = 1 + measured
    yield (
        f"{format_count(count, 'training sample')}: {format_count(steps, 'step')} in "
        f"{format_count(common.rounds, 'round')}, each with "
        f"{'all samples' if rate == 1 else f'{rate:.1%} of the samples'}; {statistics} releases of "
        "metrics and, at a hospital, one of sample counts"
    )

    for budget in budgets:
        of_counts = counts_noise or counts_noise_for(budget, delta)

        # All releases of the run for a given noise: (noise, sampling rate) -> how often. A step
        # sees a random part of the samples; metrics and counts see all of them, rate 1
        def count_releases(noise: float, of_counts: float = of_counts) -> Releases:
            spent = Counter({(noise, rate): steps})
            spent[common.statistics_noise or noise, 1.0] += statistics
            spent[of_counts, 1.0] += 1
            return spent

        noise = noise_for(budget, delta, count_releases)
        yield (
            f"  epsilon {budget:g} at delta {delta:g}: --set privacy.sample-clip-norm=1 --set "
            f"privacy.noise-multiplier={math.ceil(noise * 100) / 100:g}"
        )
