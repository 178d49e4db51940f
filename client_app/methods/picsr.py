"""PICSR at a site: train an expert, send it once with a prototype, then train the router.

The server names the ``stage``: ``warmup`` (FedAvg), ``experts`` (alone, from the site's own state)
or ``router`` (all experts and prototypes are received, and the router is trained).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Measured, Outgoing, SiteMethod, SiteNetwork
from fedsilo.client_app.session import SiteSession
from fedsilo.core.array_names import arrays_below, with_prefix
from fedsilo.core.errors import SiteError
from fedsilo.core.messages import START
from fedsilo.models.methods.picsr import (
    OWN_EXPERT,
    OWN_PROTOTYPE,
    PROTOTYPE,
    ROUTING_STAGE,
    WARMUP,
    PICSRNetwork,
    PICSRSettings,
    RoutingProbe,
    StageNotes,
    open_router,
    prototype,
    routing_weights,
)
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.mixture import open_experts
from fedsilo.models.networks.site_network import exchanged_arrays


class PICSRSite(SiteMethod):
    """Trains an expert and then a router over all experts; a prototype needs enough samples."""

    settings: PICSRSettings
    trains_stacked = True

    def admit(self, session: SiteSession) -> None:
        """Check that the site reports enough training samples to send a prototype.

        A prototype is the mean of the site's training inputs.

        Raises:
            SiteError: the reported number of training samples is below 'picsr.prototype-min-count'
                or 'privacy.sums-min-count'.
        """
        bounds = {
            "picsr.prototype-min-count": self.settings.prototype_min_count,
            # Includes a hospital's own floor
            "privacy.sums-min-count": session.settings.sums_min_count,
        }
        silo, key = session.silo, max(bounds, key=lambda name: bounds[name])
        if sum(session.reported["train"]) < bounds[key]:
            raise SiteError(
                f"site {silo.name} sends no prototype: it has fewer than {bounds[key]} training "
                f"samples ('{key}'); leave the site out"
            )

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network of the stage: all experts with the router, or a single classifier.

        The server's message names the stage. In the router stage, the network has all sites'
        experts (their own classifiers) and the router, which weighs the experts for each sample.
        Experts, router and the sites' prototypes are all received.

        Any other stage has a single classifier. All its weights come from the first of these
        sources that is not empty: the run's initial arrays, all received arrays, the stored arrays.
        If all are empty, they are drawn from the seed. Arrays with a '/' in their names are
        ignored.

        Raises:
            SettingError: the arrays do not fit the network.
        """
        if _stage(lab) == ROUTING_STAGE:
            arrays = lab.arrays()
            experts = open_experts(lab.common, lab.silo.shape, arrays)
            prototypes = arrays_below(PROTOTYPE, arrays)
            router = open_router(self.settings, prototypes, arrays)
            return lab.compute.place(PICSRNetwork(experts, prototypes, router))
        return lab.classifier(lab.arrays(START) or lab.arrays() or lab.state() or None)

    def train(self, lab: Lab) -> Outgoing:
        """Train the network of this round's stage, and choose which arrays leave.

        The server's message names the stage. If the server asks for metrics, the network is
        measured before the training.

        - "warmup": the shared network is trained and sent.
        - "experts": this site's own classifier, its expert, is trained and stored. If the server
          asks for arrays, the expert is sent too, with the site's prototype (the mean of its
          training inputs).
        - "router": only the router is trained and sent. It weighs the sites' experts for each
          sample. The learning rate is 'picsr.router-learning-rate', and the weight decay is 0.
        """
        network, stage = lab.open(), _stage(lab)
        lab.measure(network)
        if stage == ROUTING_STAGE:
            rate = self.settings.router_learning_rate
            own = replace(lab.sampling, learning_rate=rate, weight_decay=0.0)
            lab.fit(network, settings=own)
            return Outgoing(network, send=cast(PICSRNetwork, network).trained_arrays())
        lab.fit(network)
        if stage == WARMUP:
            return Outgoing(network)
        expert = exchanged_arrays(network)
        if not lab.instruction.returns:  # a prototype that stays must cost no epsilon
            return Outgoing(network, keep=expert)
        send = with_prefix(OWN_EXPERT, expert) | {OWN_PROTOTYPE: self._prototype(lab)}
        return Outgoing(network, send=send, keep=expert)

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterable[Measured]:
        """Return the network to measure, as a list with one entry.

        In the router stage, a router weighs all sites' experts (classifiers) for each sample. The
        measurement then also has the router's weights:

        - Each sample's prediction gets the weight of each expert, as ``weight.<site>``.
        - The metrics of a split get a summary of these weights. The split needs at least
          'picsr.prototype-min-count' samples, and at least 'privacy.sums-min-count', which the
          hospital may raise.

        In any other stage ``network`` is measured as usual.
        """
        if _stage(lab) != ROUTING_STAGE:
            return [Measured(network)]
        sites = cast(PICSRNetwork, network).sites
        least = max(self.settings.prototype_min_count, lab.common.sums_min_count)

        def weights_of(tokens: Tensor) -> dict[str, Tensor]:
            # (batch, experts) router weights, one column (batch,) per site
            columns = routing_weights(tokens).unbind(dim=1)
            return {f"weight.{site}": weight for site, weight in zip(sites, columns, strict=True)}

        return [Measured(network, None, lambda split: RoutingProbe(sites, least), weights_of)]

    def _prototype(self, lab: Lab) -> Tensor:
        inputs = float_inputs(lab.silo.train.inputs)
        if private := lab.privacy.means():
            return private.mean(inputs.flatten(1)).reshape(inputs.shape[1:])
        return prototype(inputs)


def _stage(lab: Lab) -> str:
    """Return the stage of this round that the server names: "warmup", "experts" or "router"."""
    return StageNotes.from_values(lab.instruction.notes).stage
