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
        """Reject a mu so large that only the last training steps would decide the result.

        mu is the strength of the pull towards the received weights. A reply that depends on a
        single step would reveal that step's gradient. ``refuse_forgetful`` trains a single weight,
        and checks that each of the first steps has an effect on the result. These are as many steps
        as the hospital's 'minimum-steps-per-reply', but at most 5. A minimum of 0 or 1 passes.

        Raises:
            RefusedError: a step has less than a hundredth of the largest effect.
        """
        least, mu = session.limits.minimum_steps_per_reply, self.settings.proximal_mu
        refuse_forgetful(session.settings, least, mu)

    def train(self, lab: Lab) -> Outgoing:
        """Train the received global model near its received weights, and send it to the server.

        The received model is measured first, if the server asks for metrics. The loss has a
        penalty: 'fedprox.proximal-mu' / 2 times the squared distance from the received weights.
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
