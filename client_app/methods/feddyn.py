"""FedDyn at a site: FedAvg with a penalty whose linear term changes each round.

The site stores the linear term's coefficients, its local gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod
from fedsilo.client_app.methods.fedprox import proximal
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.optimisers import refuse_forgetful
from fedsilo.client_app.training.terms import Term
from fedsilo.models.methods.feddyn import FedDynSettings
from fedsilo.models.methods.fedprox import linear_term


class FedDynSite(SiteMethod):
    """Adds two terms to the loss: minus the local gradient times the weights, and a penalty."""

    settings: FedDynSettings
    trains_stacked = True

    def admit(self, session: SiteSession) -> None:
        """Reject an alpha so large that only the last training steps would decide the result.

        alpha is the strength of a pull towards the received weights. A reply that depends on a
        single step would reveal that step's gradient. ``refuse_forgetful`` trains a single weight,
        and checks that each of the first steps has an effect on the result. These are as many steps
        as the hospital's 'minimum-steps-per-reply', but at most 5. A minimum of 0 or 1 passes.

        Raises:
            RefusedError: a step has less than a hundredth of the largest effect.
        """
        least, alpha = session.limits.minimum_steps_per_reply, self.settings.regularisation_alpha
        refuse_forgetful(session.settings, least, alpha)

    def train(self, lab: Lab) -> Outgoing:
        """Train with two terms added to the loss, send the network, and store the local gradient.

        The local gradient has an array for each trained parameter, and is 0 in the site's first
        round. It is the one stored with the last reply that the server used. With alpha =
        'feddyn.regularisation-alpha' the added terms are:

        - minus the inner product of the local gradient and the weights,
        - alpha / 2 times the squared distance from the received weights.

        After the training, the local gradient becomes its old value minus alpha times (trained -
        received weights), and is stored. The received model is measured first, if the server asks
        for metrics.
        """
        network, alpha = lab.open(), self.settings.regularisation_alpha
        lab.measure(network)
        received, before = lab.arrays(), lab.counted_state()
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        gradient, slopes = {}, []
        for name, parameter in trained.items():
            gradient[name] = before.get(name, torch.zeros_like(received[name]))
            slopes.append(-gradient[name].to(parameter.device))
        pull = proximal(network, alpha)

        def pull_and_drift(
            weights: Sequence[Tensor], anchors: Sequence[Tensor], slopes: Sequence[Tensor]
        ) -> Tensor:
            pulled: Tensor = pull.function(weights, anchors)
            return pulled + linear_term(weights, slopes)

        lab.fit(network, penalty=Term(pull_and_drift, trained, (*pull.constants, slopes)))
        for name, parameter in trained.items():
            moved = parameter.detach().cpu() - received[name]
            # The first-order condition of the penalised loss (the local gradient at its minimum)
            gradient[name] = gradient[name] - alpha * moved
        return Outgoing(network, keep=gradient)
