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

        The mechanism draws the batches, clips the gradients and adds noise. The ledger counts the
        epsilon that the site has spent. The number of steps and the sampling rate follow from the
        sample count that the site reports, which may be noisy.

        Args:
            settings: the settings of the training.
            aside: a key that names a further training in the same phase; empty for the main
                training.

        Raises:
            EpsilonSpentError: the training would exceed a cap on epsilon.
            RefusedError: batches are drawn at random, and 'train.batch-size' is smaller than 4
                times the hospital's 'minimum-batch'. This is not checked at a site with its own cap
                on epsilon.
            CheckpointError: a ledger is damaged, or cannot be written.
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
        """Return the number of optimiser steps in a round; nothing is charged to the ledger.

        In a private run the number follows from the sample count that the site reports, so it
        reveals nothing more. In any other run it follows from the true count and the hospital's
        'minimum-batch'.
        """
        if settings.is_private():
            return private_steps(settings, sum(self.session.reported["train"]))
        samples, floor = len(self.session.silo.train.labels), self.session.limits.minimum_batch
        return steps_of(samples, settings, floor)

    def means(self) -> PrivateMeans | None:
        """Charge the ledger for noisy means of rows, and return the object that computes them.

        The object can be used once, for the means of all classes or for one mean over all samples.
        It clips each row to 'privacy.statistics-clip-norm'. The noise multiplier is
        'privacy.statistics-noise' or, if that is 0, 'privacy.noise-multiplier'. If the run is not
        private, nothing is charged, the result is None, and exact means may leave.

        Raises:
            EpsilonSpentError: the means would exceed a cap on epsilon. Nothing is charged then.
            CheckpointError: a ledger is damaged, or cannot be written.
        """
        settings = self.session.settings
        if not settings.is_private():
            return None
        source = self.session.noise("statistics", self.round, self.session.silo.name)
        bound = settings.statistics_clip_norm
        release = self._pay(bound, statistics_noise(settings), source)
        return PrivateMeans(release, self.session.reported["train"])

    def measurements(self, bound: float) -> Release:
        """Charge the ledger for the metrics of one reply, and return the release that adds noise.

        The release is an object that can be used once. The noise multiplier is that of ``means``,
        and the noise comes from the operating system, even in a simulation.

        Args:
            bound: the largest L2 norm of one patient's part in the metrics.

        Raises:
            EpsilonSpentError: the metrics would exceed a cap on epsilon. Nothing is charged then.
            CheckpointError: a ledger is damaged, or cannot be written.
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
        """Charge the ledgers for noisy results, and return the ``Release`` that adds their noise.

        The charge is entered in the run's ledger and, if the hospital has its own cap, in the
        hospital's ledger. It is for ``releases`` results with this noise multiplier and sampling
        rate. The returned object works for as many results, and raises an error at any further one.

        Args:
            bound: C, the maximum norm of a patient's part.
            noise: the noise multiplier: the standard deviation of the noise in units of ``bound``.
            source: the random generator that draws the noise; None for the operating system's.
            releases: the number of noisy results, such as DP-SGD steps.
            rate: the probability that a patient is in one result.

        Raises:
            EpsilonSpentError: the results would exceed a cap on epsilon. Nothing is charged then.
            CheckpointError: a ledger is damaged, or cannot be written.
        """
        self.ledger.spend({(noise, rate): releases})
        return Release(bound, noise, releases, source)

    def _refuse_small_batches(self, settings: CommonSettings, rate: float) -> None:
        """Check that a randomly drawn batch is practically never smaller than the site's minimum.

        If the mean size ('train.batch-size') is at least 4 times the minimum, the probability is
        below one in a million. The check also passes if the minimum is 1, or if every batch has all
        samples.

        Args:
            settings: the settings of the training.
            rate: the probability that a sample is in a batch.

        Raises:
            RefusedError: 'train.batch-size' is below 4 times the minimum ('minimum-batch').
        """
        floor, size = self.session.smallest_batch, settings.batch_size
        if rate < 1 and floor > 1 and size < _BATCH_MARGIN * floor:
            raise RefusedError(
                f"private batches are drawn at random, {size} samples on average, so fewer than "
                f"{floor} could be in one ('minimum-batch'): set 'train.batch-size' to at least "
                f"{_BATCH_MARGIN * floor}, or 'max-epsilon' in the site file"
            )
