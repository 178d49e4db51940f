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

        A method whose sums the server proves to each site overrides this function. From the proven
        sum of the round before, the site computes the values at which the server must ask for the
        next sum, such as the coefficients of a fit. A server that could choose the values freely
        might single out a patient. The check is made at trust 'sums', before the training. This
        default always refuses.

        Args:
            part: the message, with its instruction and the received arrays.
            sites: the number of sites in the sum that the message asks for.
            before: the sum of the round before, which this site has computed from the server's
                proof; None in round 1.

        Raises:
            RefusedError: the message asks for something else, or the method does not override this
                function.
        """
        raise RefusedError(f"class '{type(self).__name__}' does not follow its sums ('follow')")

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterable[Measured]:
        """Return the networks to measure in place of ``network``, with the metrics of each.

        A method may override this. By default the only network is ``network`` itself:

        - If it is evidential (its outputs tell how much evidence it has found), it gets further
          metrics about this evidence (``evidence_of``), and each prediction gets its vacuity, which
          is high if there is little evidence.
        - If 'split.partition' is "unseen" and the method measures a model that stays at the site,
          the final evaluation has a second measurement, on only the labels that the site trained on
          (``on_own_labels``).

        The caller measures each network before it requests the next one.
        """
        plain = Measured(network)
        if evidences(network):
            plain = Measured(network, None, evidence_of(lab, network), partial(vacuity_of, network))
        if self.measures_what_stays and lab.common.partition == UNSEEN:
            return [plain, *on_own_labels(lab, network)]
        return [plain]


def on_own_labels(lab: Lab, network: SiteNetwork) -> Iterator[Measured]:
    """Yield ``network`` to be measured on only those labels that the site has trained on.

    This measurement is added to the usual one, and only in the final evaluation. It needs test
    samples with labels that the training data lack. Without such samples nothing is yielded,
    because the metrics would equal the usual ones. Only the task's headline metric and the loss are
    reported, as ``own-labels-<metric>``, such as ``own-labels-accuracy``.
    """
    known = torch.unique(lab.task.strata(lab.silo.train.labels))
    ends = lab.instruction.phase == EVALUATE
    if ends and not torch.isin(lab.task.strata(lab.silo.test.labels), known).all():
        names = {metric: f"own-labels-{metric}" for metric in (lab.task.headline, "loss")}
        yield Measured(network, names, within=known)


def evidence_of(lab: Lab, network: SiteNetwork) -> Any:
    """Return a function that makes an evidence probe of ``network`` for a split, given its name.

    A probe sees the outputs of the network's encoder during a measurement, and adds metrics. This
    probe adds the mean vacuity, which is high if the network has found little evidence for its
    predictions. In the final evaluation, if the test split has at least 'privacy.sums-min-count'
    samples, the probe also counts correct test predictions in bins of confidence and of vacuity.
    """

    def probe(split: str) -> EvidenceProbe:
        labels = lab.silo.splits()[split].labels
        final = lab.instruction.phase == EVALUATE and split == "test"
        return EvidenceProbe(network, labels, final and len(labels) >= lab.common.sums_min_count)

    return probe
