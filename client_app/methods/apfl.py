"""APFL at a site: each batch trains the global model w and, within a mixture, the own model v."""

from typing import cast

from torch import Tensor
from torch.func import functional_call

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork, TokenClassifier
from fedsilo.client_app.methods.moon import copy_network
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.client_app.training.terms import Batch, StackableLoss
from fedsilo.models.methods.apfl import APFLSettings, mixture
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged


class APFLSite(SiteMethod):
    """Stores v, receives and sends w; the model that is measured is alpha v + (1 - alpha) w."""

    settings: APFLSettings
    trains_stacked = True

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network with the weights of the mixture alpha v + (1 - alpha) w.

        w is the received global model, and v is the site's own model, stored in its last round. If
        none is stored, as in the site's first round, v equals w. alpha is 'apfl.mixing-alpha': with
        1 the mixture is v alone.
        """
        w = {name: array for name, array in lab.arrays().items() if "/" not in name}
        return lab.classifier(mixture(lab.state() or w, w, self.settings.mixing_alpha))

    def train(self, lab: Lab) -> Outgoing:
        """Train the global model w on its own loss, and the site's model v on the mixture's loss.

        The mixture is alpha v + (1 - alpha) w, where alpha is 'apfl.mixing-alpha'. Both models
        train on the same batches, with two optimisers that have the same settings. In the site's
        first round v starts from the received w, and later from the stored v. If the server asks
        for metrics, the mixture is measured before the training, and the mixture of the trained
        models afterwards. w is sent and v is stored.
        """
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        # ``network`` becomes w and ``own`` v; the measured mixture is loaded over them again below
        own = copy_network(network).train()
        load_exchanged(own, lab.state() or lab.arrays())
        load_exchanged(network, lab.arrays())
        beside = open_optimiser(own, lab.sampling)
        lab.fit(network, objective=StackableLoss(self._joint_loss, network, own), beside=beside)
        w, v = _copy_arrays(network), _copy_arrays(own)
        load_exchanged(network, mixture(v, w, self.settings.mixing_alpha))
        return Outgoing(network, send=w, keep=v)

    def _joint_loss(self, batch: Batch, w: TokenClassifier, v: TokenClassifier) -> Tensor:
        """Compute the loss that trains the global model w and the site's own model v together.

        It is the loss of w plus the loss of the mixture alpha v + (1 - alpha) w, where alpha is
        'apfl.mixing-alpha'. In the mixture w gets no gradients. Only its own loss trains w, and
        only the mixture's loss trains v.

        Args:
            batch: the inputs and labels; ``loss`` computes the loss of w, and ``criterion`` the
                loss of the mixture's logits.
            w: the global model.
            v: the site's own model, with the same arrays.

        Returns:
            The loss of the batch: a scalar for one site, or (batch,) for a stack of sites.
        """
        # Detached, so that the mixture's loss trains v and leaves w to its own loss
        fixed = {name: p.detach() for name, p in w.named_parameters()}
        mixed = mixture(dict(v.named_parameters()), fixed, self.settings.mixing_alpha)
        logits = functional_call(v, mixed, (batch.inputs,))
        # w's criterion is used for both, because its evidential KL weight follows the epochs
        return batch.loss(batch.inputs, batch.labels) + batch.criterion(logits, batch.labels)


def _copy_arrays(network: TokenClassifier) -> dict[str, Tensor]:
    """Copy a network's arrays, because the mixture is loaded over them."""
    return {name: array.clone() for name, array in exchanged_arrays(network).items()}
