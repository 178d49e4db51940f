"""What a method says at a site: how its network is opened, and the steps of each phase.

A method is a class with a function per phase, named as the phase with dashes as underscores. A
phase is given the ``Lab`` and returns ``Outgoing``. An author meets eight names: of the class
``open`` and ``train``; of the lab ``arrays`` (as received), ``state`` (what this site has kept),
``classifier`` (the run's network), ``measure`` and ``fit``; and ``Outgoing``. Two more functions
have defaults: ``measured`` (which networks are measured, and what else of them) and ``admit``
(whether this site can take part). A class whose model stays at the site says so for private runs:
``measures_what_stays``. ``__all__`` are the names that a method's file takes from here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from fedsilo.client_app.lab import Lab, Outgoing
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.evaluation import Measured
from fedsilo.client_app.training.evidence_probe import EvidenceProbe, vacuity_of
from fedsilo.datasets.partition.cuts import UNSEEN
from fedsilo.models.contract.messages import EVALUATE
from fedsilo.models.maths.dirichlet import evidences
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier

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
    """One method at one site; from message to message it keeps only its settings.

    Attributes:
        settings: the method's own.
        measures_what_stays: whether it measures a model that ``lab.fit(stays=True)`` trained. What
            such a model says of other patients has no noise: under a cap on epsilon it stays too.
        trains_plainly: whether ``train`` only passes the received network to ``lab.fit``, without
            further arguments: sites of a simulation can then be trained as one.
    """

    measures_what_stays: ClassVar[bool] = False
    trains_plainly: ClassVar[bool] = False

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def admit(self, session: SiteSession) -> None:  # noqa: B027  # most methods take every site
        """Check that this site can take part, before anything leaves it.

        Raises:
            SiteError: it cannot.
        """

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network that is trained and measured: here with all received arrays."""
        return lab.classifier(lab.arrays())

    @abstractmethod
    def train(self, lab: Lab) -> Outgoing:
        """Train here, and return what leaves and what stays."""

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterable[Measured]:
        """Return the networks to measure in place of ``network``, each with its further metrics.

        An evidential network is also measured for its vacuity and, at the end, if there are enough
        test samples, for how its accuracy depends on its certainty. A model that stays is also
        measured on its silo's own labels if other silos have labels that this silo has not.
        Each network is measured before the next one is asked for.
        """
        plain = Measured(network)
        if evidences(network):
            plain = Measured(network, None, evidence_of(lab, network), partial(vacuity_of, network))
        if self.measures_what_stays and lab.common.partition == UNSEEN:
            return [plain, *on_own_labels(lab, network)]
        return [plain]


def on_own_labels(lab: Lab, network: SiteNetwork) -> Iterator[Measured]:
    """Yield ``network`` to be measured at the end on only the labels that the silo trains on.

    The metrics are ``own-labels-accuracy`` and ``own-labels-loss``. Nothing is yielded if all test
    samples have these labels, because the metrics would be the usual ones.
    """
    known = torch.unique(lab.silo.train.labels)
    ends = lab.instruction.phase == EVALUATE
    if ends and not torch.isin(lab.silo.test.labels, known).all():
        names = {metric: f"own-labels-{metric}" for metric in ("accuracy", "loss")}
        yield Measured(network, names, within=known)


def evidence_of(lab: Lab, network: SiteNetwork) -> Any:
    """Return a function that makes the evidence probe of ``network`` for a split's name."""

    def probe(split: str) -> EvidenceProbe:
        labels = lab.silo.splits()[split].labels
        final = lab.instruction.phase == EVALUATE and split == "test"
        return EvidenceProbe(network, labels, final and len(labels) >= lab.common.sums_min_count)

    return probe
