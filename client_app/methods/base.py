"""The hospital's side of a method: it opens the network and defines the steps of each phase.

A method is a class with one function per phase, named like the phase with underscores for dashes. A
phase gets the ``Lab`` and returns ``Outgoing``. A message can ask only for the phases in the class
attribute ``phases``. A class that has other phases than ``train`` lists all of them there; no
message can call its further functions. An author needs eight names. Of the class: ``open`` and
``train``. Of the lab: ``arrays`` (received), ``state`` (stored by this site), ``classifier`` (the
run's network), ``measure`` and ``fit``. And ``Outgoing``.

Two more functions have defaults: ``measured`` (which networks are measured, and further metrics)
and ``admit`` (whether this site can take part). A class whose model stays at the site sets
``measures_what_stays``, for private runs. A method's file imports the names in ``__all__``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from fedsilo.client_app.lab import Lab, Outgoing
from fedsilo.client_app.masked_part import MaskedPart
from fedsilo.client_app.privacy.proven_sums import ProvenSum
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.evaluation import EvidenceProbe, Measured, vacuity_of
from fedsilo.core.errors import RefusedError
from fedsilo.core.messages import EVALUATE
from fedsilo.datasets.partition.cuts import UNSEEN
from fedsilo.models.networks.site_network import (
    SiteNetwork,
    TokenClassifier,
    evidences,
    exchanged_arrays,
    load_exchanged,
)

__all__ = [
    "Lab",
    "Measured",
    "Outgoing",
    "SiteMethod",
    "SiteNetwork",
    "TokenClassifier",
    "exchanged_arrays",
    "load_exchanged",
]


class SiteMethod(ABC):
    """One method at one site; between messages it keeps only its settings.

    Attributes:
        settings: the method's own settings.
        phases: the phases that a message may ask for, by their names in messages.
        measures_what_stays: whether it measures a model that ``lab.fit(stays=True)`` trained. The
            metrics of such a model have no noise for other patients, so with a cap on epsilon they
            stay too.
        trains_stacked: whether simulated sites can be trained as one batch. Then ``train`` gives
            ``lab.fit`` only a ``StackableLoss`` as objective, only a ``Term`` as penalty, and only
            a ``GradientSum`` to call after each step. A second optimiser has the run's settings.
            The site's own model is trained last. A subclass does not inherit the value, because it
            may do more.
    """

    phases: ClassVar[tuple[str, ...]] = ("train",)
    measures_what_stays: ClassVar[bool] = False
    trains_stacked: ClassVar[bool] = False

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def admit(self, session: SiteSession) -> None:  # noqa: B027  # most methods take every site
        """Check that this site can take part, before anything leaves it; by default every site can.

        Raises:
            SiteError: the site cannot take part.
        """

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network to train and measure; by default with the received weights."""
        return lab.classifier(lab.arrays())

    @abstractmethod
    def train(self, lab: Lab) -> Outgoing:
        """Train at this site, and return the arrays that leave and those that stay."""

    def follow(self, part: MaskedPart, sites: int, before: ProvenSum | None) -> None:
        """Check that the server asks for exactly the sum that must follow from the sum before it.

        A method overrides this if the server proves its sums. This default always refuses.
        ``sites`` is the number of sites in the sum. ``before`` is the last round's sum, and None in
        round 1.

        Raises:
            RefusedError: the message asks for something else.
        """
        raise RefusedError(f"class '{type(self).__name__}' does not follow its sums ('follow')")

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterable[Measured]:
        """Return the networks to measure in place of ``network``, with the metrics of each.

        By default this is ``network``. An evidential network also reports how much evidence it
        finds. If 'split.partition' is "unseen", the final evaluation also measures a model that
        stays on only the labels that it was trained on. The caller measures each network before
        requesting the next.
        """
        plain = Measured(network)
        if evidences(network):
            plain = Measured(network, None, evidence_of(lab, network), partial(vacuity_of, network))
        if self.measures_what_stays and lab.common.partition == UNSEEN:
            return [plain, *on_own_labels(lab, network)]
        return [plain]


def on_own_labels(lab: Lab, network: SiteNetwork) -> Iterator[Measured]:
    """Yield ``network`` to be measured on only those labels that the site has trained on.

    This happens only in the final evaluation, and if test samples have labels that the training
    data lack. Only the headline metric and the loss are reported, with names such as
    ``own-labels-accuracy``.
    """
    known = torch.unique(lab.task.strata(lab.silo.train.labels))
    ends = lab.instruction.phase == EVALUATE
    if ends and not torch.isin(lab.task.strata(lab.silo.test.labels), known).all():
        names = {metric: f"own-labels-{metric}" for metric in (lab.task.headline, "loss")}
        yield Measured(network, names, within=known)


def evidence_of(lab: Lab, network: SiteNetwork) -> Any:
    """Return a function that makes a split's evidence probe of ``network``, given the split's name.

    The probe reports the mean vacuity, which is high if the network finds little evidence. In the
    final evaluation it also counts correct test predictions by confidence and vacuity. The test
    split then needs 'privacy.sums-min-count' samples.
    """

    def probe(split: str) -> EvidenceProbe:
        labels = lab.silo.splits()[split].labels
        final = lab.instruction.phase == EVALUATE and split == "test"
        return EvidenceProbe(network, labels, final and len(labels) >= lab.common.sums_min_count)

    return probe
