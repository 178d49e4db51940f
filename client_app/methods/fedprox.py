"""FedProx at a site: FedAvg with a proximal term in the loss."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.optimisers import refuse_forgetful
from fedsilo.client_app.training.terms import Term
from fedsilo.models.methods.fedprox import FedProxSettings, proximal_term


class FedProxSite(SiteMethod):
    """Trains like FedAvg, with a proximal term towards the received weights."""

    settings: FedProxSettings
    trains_stacked = True

    def admit(self, session: SiteSession) -> None:
        """Reject a mu so large that each training step undoes the steps before it.

        A reply after such steps would reveal the gradient of a single step. ``refuse_forgetful``
        tries out the first steps on a single weight: as many as the hospital's
        'minimum-steps-per-reply', but at most 5. A site whose minimum is 0 or 1 passes.

        Raises:
            RefusedError: some of these steps have too little effect on the result.
        """
        least, mu = session.limits.minimum_steps_per_reply, self.settings.proximal_mu
        refuse_forgetful(session.settings, least, mu)

    def train(self, lab: Lab) -> Outgoing:
        """Train the received global model with the proximal term, and send it to the server.

        The received model is measured first, if the server asks for metrics. The term pulls the
        weights towards the received ones, with the factor 'fedprox.proximal-mu'.
        """
        network = lab.open()
        lab.measure(network)
        lab.fit(network, penalty=proximal(network, self.settings.proximal_mu))
        return Outgoing(network)


def proximal(network: SiteNetwork, mu: float, around: Mapping[str, Tensor] | None = None) -> Term:
    """Return a penalty that pulls the trainable parameters of ``network`` towards fixed weights.

    The penalty is called without arguments. It returns mu / 2 times the squared distance between
    the parameters at that time and the fixed weights (``proximal_term``).

    Args:
        network: the network, on the compute device.
        mu: the factor of the proximal term.
        around: the fixed weights by name, at least for all trainable parameters; None for a copy of
            the present parameters.
    """
    # Only trained parameters, because a ViT has 22 million frozen ones
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    anchors = [(around or trained)[name].detach().clone().to(p) for name, p in trained.items()]
    return Term(partial(proximal_term, mu), trained, (anchors,))
