"""Differential privacy for one message: the ledger is charged before each mechanism is used."""

from dataclasses import dataclass

import torch

from fedsilo.client_app.privacy.ledger import Ledger
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.loop import steps_of
from fedsilo.client_app.training.private import PrivateTraining, private_rate, private_steps
from fedsilo.client_app.training.site_class_means import PrivateMeans
from fedsilo.core.errors import RefusedError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.privacy.promises import statistics_noise
from fedsilo.models.privacy.release import Release

# If the mean batch is this many times the floor, P(batch < floor) is below 1e-6
_BATCH_MARGIN = 4


@dataclass(frozen=True)
class PatientPrivacy:
    """The differentially private mechanisms that answer one message, and their cost in epsilon."""

    session: SiteSession  # the run at this site
    round: int  # the message's round
    ledger: Ledger  # counts the epsilon that the site spends in this run

    def training(self, settings: CommonSettings, aside: tuple[str, ...] = ()) -> PrivateTraining:
        """Charge the ledger for a DP-SGD training, and return the mechanism of the training.

        The mechanism draws the batches, clips the gradients and adds noise. Steps and sampling rate
        follow from the reported sample count. ``aside`` names a further training.

        Raises:
            EpsilonSpentError: the training would exceed a cap on epsilon.
            RefusedError: randomly drawn batches may be too small.
        """
        key: tuple[int | str, ...] = (self.round, self.session.silo.name, *aside)
        reported = sum(self.session.reported["train"])
        sampling = self.session.noise("batches", *key)
        self._refuse_small_batches(settings, private_rate(settings, reported))
        release = self._pay(
            settings.sample_clip_norm,
            settings.noise_multiplier,
            self.session.noise("privacy", *key),
            private_steps(settings, reported),
            private_rate(settings, reported),
        )
        return PrivateTraining(settings, reported, release, sampling)

    def steps(self, settings: CommonSettings) -> int:
        """Return the number of optimiser steps that the settings give in a round, without a charge.

        In a private run the number follows from the reported sample count, so the server learns
        nothing new from it. In any other run it follows from the true count and the hospital's
        'minimum-batch'.
        """
        if settings.is_private():
            return private_steps(settings, sum(self.session.reported["train"]))
        samples, floor = len(self.session.silo.train.labels), self.session.limits.minimum_batch
        return steps_of(samples, settings, floor)

    def means(self) -> PrivateMeans | None:
        """Charge the ledger for noisy means of vectors, and return the object that computes them.

        Each training sample has one vector, clipped to 'privacy.statistics-clip-norm'. The object
        can be used once. If the run is not private, the result is None, and exact means may leave.

        Raises:
            EpsilonSpentError: the means would exceed a cap on epsilon.
            CheckpointError: a ledger is unusable.
        """
        settings = self.session.settings
        if not settings.is_private():
            return None
        source = self.session.noise("statistics", self.round, self.session.silo.name)
        bound = settings.statistics_clip_norm
        release = self._pay(bound, statistics_noise(settings), source)
        return PrivateMeans(release, self.session.reported["train"])

    def measurements(self, bound: float) -> Release:
        """Charge the ledger for one reply's metrics, and return the object that adds their noise.

        ``bound`` is the largest L2 norm of one patient's contribution. The object can be used once.
        Its noise comes from the operating system, even in a simulation.

        Raises:
            EpsilonSpentError: the metrics would exceed a cap on epsilon.
            CheckpointError: a ledger is unusable.
        """
        return self._pay(bound, statistics_noise(self.session.settings), None)

    def _pay(
        self,
        bound: float,
        noise: float,
        source: torch.Generator | None,
        releases: int = 1,
        rate: float = 1.0,
    ) -> Release:
        """Charge the ledgers for noisy results, and return the object that adds their noise.

        ``bound`` is the norm of one patient's contribution, and ``noise`` the standard deviation in
        its units. ``rate`` is a sample's probability of being drawn. Too little epsilon raises an
        EpsilonSpentError.
        """
        self.ledger.spend({(noise, rate): releases})
        return Release(bound, noise, releases, source)

    def _refuse_small_batches(self, settings: CommonSettings, rate: float) -> None:
        """Refuse random batches that could be smaller than the site's 'minimum-batch'.

        'train.batch-size', their mean size, must be at least 4 times this minimum. The check passes
        if ``rate`` is 1, because every batch then has all samples.
        """
        floor, size = self.session.smallest_batch, settings.batch_size
        if rate < 1 and floor > 1 and size < _BATCH_MARGIN * floor:
            raise RefusedError(
                f"private batches are drawn at random, {size} samples on average, so fewer than "
                f"{floor} could be in one ('minimum-batch'): set 'train.batch-size' to at least "
                f"{_BATCH_MARGIN * floor}, or 'max-epsilon' in the site file"
            )
