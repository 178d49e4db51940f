"""The oracle: one simulated site trains on the training data of all, which no hospital could."""

from dataclasses import replace
from typing import cast

import torch

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, TokenClassifier
from fedsilo.client_app.training.evaluation import measure
from fedsilo.client_app.training.initial_network import set_prior, weighted_criterion
from fedsilo.client_app.training.standardised import ready_silo
from fedsilo.core.errors import SiteError
from fedsilo.core.messages import TRAINED, measurement
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.methods.mix import PoolNotes


class MixSite(SiteMethod):
    """Trains on the pooled data of all sites if the server chose this site; otherwise measures."""

    def train(self, lab: Lab) -> Outgoing:
        """Train on the pooled data of all sites, or only measure if this site is not the trainer.

        The trainer is the site from which the server asks for arrays. If the server asks for
        metrics, every site first measures the received model.

        - The trainer trains on the samples of all sites, and sends the network. The number of steps
          is 'train.local-steps' times the number of sites. If that setting is 0, it trains for
          'train.local-epochs' epochs.
        - Any other site trains nothing and sends no arrays. It reports the received model's loss on
          its training samples, under the usual key of a training loss (``trained.train.loss``).

        Raises:
            SiteError: this site is the trainer, but this is not a simulation.
            DataError: the data of a site cannot be loaded.
        """
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        if not lab.instruction.returns:
            key = (lab.instruction.round, lab.site, "train")
            loss = measure(network, lab.silo.train, lab.sampling, lab.compute, key, task=lab.task)[
                "loss"
            ]
            lab.metrics[measurement(TRAINED, "train", "loss")] = loss
            return Outgoing()
        pooled, steps = pooled_training_data(lab), len(_sites(lab)) * lab.common.local_steps
        if lab.common.class_weights != "none":
            network.criterion = weighted_criterion(lab.common, replace(lab.silo, train=pooled))
        set_prior(network, pooled.labels)
        lab.fit(network, split=pooled, settings=replace(lab.common, local_steps=steps))
        # The model is measured with the site's own prior, like every other model
        set_prior(network, lab.silo.train.labels)
        return Outgoing(network)


def pooled_training_data(lab: Lab) -> Split:
    """Load the training samples of all sites in the run, and join them into one split.

    The server's message lists the sites, and the samples follow in the order of this list. A table
    is standardised for each site separately, as in that site's own training.

    Raises:
        SiteError: this is not a simulation.
        DataError: the data of a site cannot be loaded.
    """
    if not lab.session.simulated:
        raise SiteError(
            f"site {lab.site}: method 'mix' pools the data of all sites, which only a "
            "simulation can; choose a federated method"
        )
    inputs, labels = [], []
    for name in _sites(lab):
        silo = ready_silo(load_silo(name, lab.common), lab.common, lab.content)
        inputs.append(silo.train.inputs)
        labels.append(silo.train.labels)
    return Split(torch.cat(inputs), torch.cat(labels))


def _sites(lab: Lab) -> tuple[str, ...]:
    return PoolNotes.from_values(lab.instruction.notes).sites
