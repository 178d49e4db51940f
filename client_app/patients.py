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

        The mechanism draws the batches, clips the gradients and adds noise. The run's ledger counts
        the epsilon that the site has spent. A hospital with its own cap on epsilon has a second
        ledger, which is charged too. The number of steps and the sampling rate follow from the
        reported sample count, which may be noisy.

        Args:
            settings: the settings of the training.
            aside: empty for the main training of a phase. A second training in the same phase has a
                key, such as ("global",), so that its random draws differ.

        Raises:
            EpsilonSpentError: the training would exceed a cap on epsilon.
            RefusedError: randomly drawn batches may be too small, because 'train.batch-size' is
                below 4 times the hospital's 'minimum-batch'. A site with its own cap on epsilon
                skips this check, because noise hides the samples of its batches.
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

        There is one vector per training sample, and it is clipped to
        'privacy.statistics-clip-norm'. The object can be used once, for the means of all classes or
        for one mean over all samples. The noise multiplier is 'privacy.statistics-noise' or, if
        that is 0, 'privacy.noise-multiplier'. If the run is not private, nothing is charged, the
        result is None, and exact means may leave.

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
        """Charge the ledger for one reply's metrics, and return the object that adds their noise.

        The object can be used once. The noise multiplier is 'privacy.statistics-noise' or, if that
        is 0, 'privacy.noise-multiplier'. The noise comes from the operating system, even in a
        simulation.

        Args:
            bound: the largest L2 norm of one patient's contribution to the metrics.

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

        The charge goes to the run's ledger and, if the hospital has its own cap, to the hospital's
        ledger. The returned object adds noise to as many results as are paid for. One more raises
        an error.

        Args:
            bound: the largest norm of one patient's contribution to a result.
            noise: the noise multiplier: the standard deviation of the noise in units of ``bound``.
            source: the random generator that draws the noise; None for the operating system's.
            releases: the number of noisy results, such as DP-SGD steps.
            rate: the probability that a patient's sample is drawn for one result; 1 if all are
                used.

        Raises:
            EpsilonSpentError: the results would exceed a cap on epsilon. Nothing is charged then.
            CheckpointError: a ledger is damaged, or cannot be written.
        """
        self.ledger.spend({(noise, rate): releases})
        return Release(bound, noise, releases, source)

    def _refuse_small_batches(self, settings: CommonSettings, rate: float) -> None:
        """Check that a randomly drawn batch is practically never smaller than the site's minimum.

        If the mean size ('train.batch-size') is at least 4 times the minimum, a batch is smaller
        than the minimum with a probability below one in a million. The check also passes if the
        minimum is 1, or if ``rate`` is 1, because every batch then has all samples.

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
