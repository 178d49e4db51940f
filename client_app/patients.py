"""How one message's training and statistics hide each patient, paid for before they are made."""

from dataclasses import dataclass

import torch

from fedsilo.client_app.privacy.ledger import Ledger
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.class_means import PrivateMeans
from fedsilo.client_app.training.loop import steps_of
from fedsilo.client_app.training.private import PrivateTraining, private_rate, private_steps
from fedsilo.models.contract.errors import RefusedError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.promises import statistics_noise
from fedsilo.models.privacy.release import Release

_CROWD = 4  # a batch of so many times the floor is below it in less than one of a million steps


@dataclass(frozen=True)
class PatientPrivacy:
    """Differential privacy per patient, for the answer to one message."""

    session: SiteSession  # of the run
    round: int  # of the message
    ledger: Ledger  # of what the site spends in this run

    def training(self, settings: CommonSettings, aside: tuple[str, ...] = ()) -> PrivateTraining:
        """Return how a private training hides patients, once it is paid for.

        Args:
            settings: of the training.
            aside: names a training of something else than the site's own model.

        Raises:
            EpsilonSpentError: it would exceed a cap.
            RefusedError: no cap bounds the run, and its batches are small.
        """
        key: tuple[int | str, ...] = (self.round, self.session.silo.name, *aside)
        told, sampling = sum(self.session.told()["train"]), self.session.noise("batches", *key)
        self._refuse_small_batches(settings, private_rate(settings, told))
        release = self._pay(
            settings.sample_clip_norm,
            settings.noise_multiplier,
            self.session.noise("privacy", *key),
            private_steps(settings, told),
            private_rate(settings, told),
        )
        return PrivateTraining(settings, told, release, sampling)

    def steps(self, settings: CommonSettings) -> int:
        """Return the optimiser steps of a round; of private ones the real samples tell nothing."""
        if settings.is_private():
            return private_steps(settings, sum(self.session.told()["train"]))
        samples, floor = len(self.session.silo.train.labels), self.session.limits.minimum_batch
        return steps_of(samples, settings, floor)

    def means(self) -> PrivateMeans | None:
        """Return what makes means of this site's samples private, once they are paid for.

        Returns:
            None where they need not be.

        Raises:
            EpsilonSpentError: they would exceed a cap.
        """
        settings = self.session.settings
        if not settings.is_private():
            return None
        source = self.session.noise("statistics", self.round, self.session.silo.name)
        bound = settings.statistics_clip_norm
        release = self._pay(bound, statistics_noise(settings), source)
        return PrivateMeans(release, self.session.told()["train"])

    def measurements(self, bound: float) -> Release:
        """Pay for measurements of one reply, and return their bound and noise.

        Args:
            bound: the largest norm of a patient's part.

        Raises:
            EpsilonSpentError: they would exceed a cap.
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
        """Charge the ledger for releases, and return what makes so many of them and no more."""
        self.ledger.spend({(noise, rate): releases})
        return Release(bound, noise, releases, source)

    def _refuse_small_batches(self, settings: CommonSettings, rate: float) -> None:
        floor, size = self.session.smallest_batch, settings.batch_size
        if rate < 1 and floor > 1 and size < _CROWD * floor:
            raise RefusedError(
                f"private batches are drawn at random, {size} samples on average, and fewer than "
                f"{floor} could be in one ('minimum-batch'): set 'batch-size' to at least "
                f"{_CROWD * floor}, or 'max-epsilon' in the site file"
            )
