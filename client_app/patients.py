"""Differential privacy of one message's training and statistics, paid for before they are made."""

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

_CROWD = 4  # if a batch is this many times the floor on average, P(batch < floor) is below 1e-6


@dataclass(frozen=True)
class PatientPrivacy:
    """Differential privacy per patient, for the answer to one message."""

    session: SiteSession  # the run at this site
    round: int  # the message's round
    ledger: Ledger  # counts the epsilon that the site spends in this run

    def training(self, settings: CommonSettings, aside: tuple[str, ...] = ()) -> PrivateTraining:
        """Pay for a private training, and return its mechanism.

        Args:
            settings: the settings of the training.
            aside: names a training of another model than the site's own.

        Raises:
            EpsilonSpentError: it would exceed a cap on epsilon.
            RefusedError: no cap bounds the run, and its batches are too small.
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
        """Return the optimiser steps of a round; private ones do not depend on the real samples."""
        if settings.is_private():
            return private_steps(settings, sum(self.session.reported["train"]))
        samples, floor = len(self.session.silo.train.labels), self.session.limits.minimum_batch
        return steps_of(samples, settings, floor)

    def means(self) -> PrivateMeans | None:
        """Pay for private means of this site's samples, and return their mechanism.

        Returns:
            None if the run is not private.

        Raises:
            EpsilonSpentError: they would exceed a cap on epsilon.
        """
        settings = self.session.settings
        if not settings.is_private():
            return None
        source = self.session.noise("statistics", self.round, self.session.silo.name)
        bound = settings.statistics_clip_norm
        release = self._pay(bound, statistics_noise(settings), source)
        return PrivateMeans(release, self.session.reported["train"])

    def measurements(self, bound: float) -> Release:
        """Pay for the metrics of one reply, and return their bound and noise.

        Args:
            bound: the largest L2 norm of a patient's contribution.

        Raises:
            EpsilonSpentError: they would exceed a cap on epsilon.
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
        """Charge the ledger for ``releases``, and return what makes exactly that many."""
        self.ledger.spend({(noise, rate): releases})
        return Release(bound, noise, releases, source)

    def _refuse_small_batches(self, settings: CommonSettings, rate: float) -> None:
        floor, size = self.session.smallest_batch, settings.batch_size
        if rate < 1 and floor > 1 and size < _CROWD * floor:
            raise RefusedError(
                f"private batches are drawn at random, {size} samples on average, and fewer than "
                f"{floor} could be in one ('minimum-batch'): set 'train.batch-size' to at least "
                f"{_CROWD * floor}, or 'max-epsilon' in the site file"
            )
