"""A hospital's limits for every server: floors and quotas, with safe defaults.

They hold at every real site, even without a site file. Only the hospital's node config and its site
file change them; no run and no message can. A simulated site has no limits.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flwr.app import Context

from fedsilo.client_app.site.node import build_settings, is_simulated
from fedsilo.core.errors import RefusedError
from fedsilo.core.messages import measurements
from fedsilo.core.settings.common_settings import SUMS, CommonSettings
from fedsilo.core.settings_schema import as_mapping, defaults, setting
from fedsilo.models.privacy.promises import statistics_noise

MEGABYTE = 10**6
# The role of a key tells policy.py which of two values is the stricter one
floor, quota, cap = (partial(setting, roles=role) for role in ("floor", "quota", "cap"))
most = partial(setting, roles="most")


@dataclass(frozen=True)
class Limits:
    """Minimums (floors) and quotas of one hospital; docs/site-file.md explains each key."""

    minimum_batch: int = floor(8, "fewest different samples behind an optimiser step", ge=1)
    minimum_measured: int = floor(20, "fewest samples behind a metric", ge=1)
    minimum_steps_per_reply: int = floor(2, "fewest optimiser steps behind a reply", ge=1)
    sums_min_count: int = floor(
        10, "fewest samples behind sums and means; a run may set more", ge=1
    )
    colluding_sites: int = floor(
        1, "other sites that may collude with the server without seeing this site's part", ge=0
    )
    minimum_clip_norm: float = floor(
        1e-6, "smallest norm to which a run may clip a patient's part", ge=0.0
    )
    maximum_clip_norm: float = most(1e6, "largest such norm", gt=0.0)
    minimum_noise: float = floor(
        1e-6, "smallest standard deviation of a run's noise, in units of a patient's part", ge=0.0
    )
    maximum_noise: float = most(1e6, "largest such deviation", gt=0.0, le=1e6)
    counts_noise: float = floor(
        0.0,
        "standard deviation of noise on label counts, in patients; 0 for one that costs a quarter "
        "of max-epsilon",
        ge=0.0,
        le=1e6,
    )
    secure_samples: int = setting(
        16384,
        "sample count at which a site's weight in a sum is capped; the same in all site files",
        roles="least",
        ge=1,
        le=2**20,
    )
    clip_norm: float = setting(
        5.0,
        "the only 'secure.clip-norm' for runs at 'trust: sums', so that no run can scale this "
        "site's part in another way",
        roles="least",
        gt=0.0,
        le=1e6,
    )
    max_messages: int = quota(100, "maximum number of answered messages of one run", ge=1)
    max_repeats: int = quota(3, "maximum number of answers to one phase of one round", ge=1)
    max_runs_per_day: int = quota(20, "maximum number of new runs in 24 hours", ge=1)
    max_seconds: float = quota(86400.0, "maximum seconds of work for one run", gt=0.0)
    max_memory: int = setting(
        0,
        "maximum megabytes of a message's process, or 0 for nine tenths of the machine's",
        roles=("quota", "cap"),
        ge=0,
    )
    max_state: int = quota(20_000, "maximum megabytes of runs' private states", ge=0)
    max_cache: int = quota(100_000, "maximum megabytes of decoded data", ge=0)

    def refuse_settings(self, settings: CommonSettings) -> None:
        """Check a run's settings against the minimums and quotas that do not depend on the data.

        The settings are batch sizes, clip norms, noise and the number of rounds.

        Raises:
            RefusedError: a limit forbids the run. The error gives the run's value, the limit and
                the limit's key; only the first reason is given.
        """
        reason = next(self._reasons_against(settings), "")
        if reason:
            raise RefusedError(reason)

    def _reasons_against(self, settings: CommonSettings) -> Iterator[str]:
        """Yield a sentence for each of the hospital's limits that a run's settings break.

        The caller tells the server only the first sentence. The order is:

        - 'train.batch-size' and 'train.micro-batch' must be 0 or at least 'minimum-batch'.
        - A private run's clip norms and noise must be within the hospital's minimum and maximum.
        - In a run at trust 'sums', 'secure.clip-norm' must equal the hospital's 'clip-norm'.
        - The number of rounds must be below 'max-messages'. With secure aggregation a round counts
          five times, because it needs four more messages.
        """
        sizes = {"train.batch-size": settings.batch_size, "train.micro-batch": settings.micro_batch}
        for key, size in sizes.items():
            if size and size < self.minimum_batch:
                yield (
                    f"the run's '{key}' is {size}, but this hospital requires at least "
                    f"{self.minimum_batch} samples per step ('minimum-batch'): raise it, or leave "
                    "the site out"
                )
        if settings.is_private():
            yield from self._reasons_against_noise(settings)
        # Sums of the same updates with different clip norms would together reveal single sites'
        # parts
        if settings.trust == SUMS and settings.clip_norm != self.clip_norm:
            yield (
                f"the run's 'secure.clip-norm' is {settings.clip_norm:g}, but this hospital adds "
                f"its part to sums only with {self.clip_norm:g}, because different ones would "
                f"reveal it: set the run's 'secure.clip-norm' to {self.clip_norm:g}, or ask the "
                "hospital to change the one in its site file"
            )
        # A secure round has four more messages, and some methods have more phases
        phases = 1
        if settings.secure_aggregation != "none":
            phases = 5
        if settings.rounds * phases >= self.max_messages:
            rounds = f"{settings.rounds} rounds"
            if phases > 1:
                rounds += f" of {phases} messages"
            yield (
                f"the run has {rounds}, but only {self.max_messages} messages "
                "of a run are answered ('max-messages'): ask for fewer, or leave the site out"
            )

    def _reasons_against_noise(self, settings: CommonSettings) -> Iterator[str]:
        """Yield a sentence for each clip norm or noise multiplier outside the hospital's limits.

        A private run has two of each: one for the samples' gradients and one for statistics, such
        as class means. A value equal to a limit is allowed. With an extreme value, a run would
        train nothing and would only probe the site.
        """
        norms = self.minimum_clip_norm, self.maximum_clip_norm
        noises = self.minimum_noise, self.maximum_noise
        for key, value, (least, largest), limits in (
            ("privacy.sample-clip-norm", settings.sample_clip_norm, norms, "clip-norm"),
            ("privacy.statistics-clip-norm", settings.statistics_clip_norm, norms, "clip-norm"),
            ("privacy.noise-multiplier", settings.noise_multiplier, noises, "noise"),
            ("privacy.statistics-noise", statistics_noise(settings), noises, "noise"),
        ):
            if not least <= value <= largest:
                yield (
                    f"the run's '{key}' is {value:g}, but here it must be between {least:g} "
                    f"('minimum-{limits}') and {largest:g} ('maximum-{limits}'): change it, or "
                    "leave the site out"
                )

    def drop_small_splits(
        self, metrics: Mapping[str, float], sizes: Mapping[str, int]
    ) -> dict[str, float]:
        """Return the metrics except those of splits with too few samples.

        A split needs at least 'minimum-measured' samples. Metrics that belong to no split stay.

        Args:
            metrics: value by key; ``<model>.<split>.<metric>`` belongs to a split.
            sizes: the number of samples in each split; a split that is missing here has 0.
        """
        enough = dict(metrics)
        for model, split, metric, _ in measurements(metrics):
            if sizes.get(split, 0) < self.minimum_measured:
                enough.pop(f"{model}.{split}.{metric}", None)
        return enough


NO_LIMITS = Limits(
    minimum_batch=1,
    minimum_measured=1,
    minimum_steps_per_reply=1,
    sums_min_count=1,
    colluding_sites=0,
    minimum_clip_norm=0.0,
    maximum_clip_norm=sys.float_info.max,  # no limit
    minimum_noise=0.0,
    maximum_noise=1e6,
)


def limits_of(context: Context) -> Limits:
    """Read a site's limits from its node config.

    A missing limit gets a default. At a hospital, this is the default of the class ``Limits``. A
    simulated site gets the value of ``NO_LIMITS``, which allows everything but has the usual
    quotas.

    Raises:
        SettingError: a value of the node config has the wrong type or is out of range.
    """
    limits: dict[str, Any] = {}
    if is_simulated(context):
        limits = as_mapping(NO_LIMITS)
    for key in defaults(Limits):
        if key in context.node_config:
            limits[key] = context.node_config[key]
    return build_settings(Limits, limits)
