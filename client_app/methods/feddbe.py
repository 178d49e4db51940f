"""FedDBE at a site: train with a bias of its own, near the mean feature of all sites."""

from typing import cast

import torch
from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork, exchanged_arrays
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.site_class_means import class_means
from fedsilo.core.errors import SiteError
from fedsilo.models.methods.feddbe import (
    BIAS,
    MEAN,
    BiasedNetwork,
    FedDBESettings,
    MeanPull,
    why_mean_stays,
)


class FedDBESite(SiteMethod):
    """Sends the network and the mean feature, and stores the site's own bias."""

    settings: FedDBESettings

    def admit(self, session: SiteSession) -> None:
        """Check that the site reports enough training samples to send its mean feature.

        The mean feature is the mean of the encoder's outputs over the site's training samples. A
        mean over few samples would reveal them.

        Raises:
            SiteError: the site reports fewer training samples than 'privacy.sums-min-count'.
        """
        samples = sum(session.reported["train"])
        reason = why_mean_stays(samples, session.settings.sums_min_count)
        if reason:
            raise SiteError(
                f"site {session.silo.name}: {reason}: lower 'privacy.sums-min-count' here, or "
                "choose another method"
            )

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network from the received weights, with the site's stored bias or zeros."""
        network = BiasedNetwork(lab.classifier(lab.arrays()), lab.state().get(BIAS))
        return cast(SiteNetwork, lab.compute.place(network))

    def train(self, lab: Lab) -> Outgoing:
        """Train the network, and the site's bias once the mean feature of all sites is known.

        The bias is a learned array that this site adds to its tokens (the encoder's outputs). The
        mean feature is the mean of all sites' tokens without bias. The received model is measured
        first, if the server asks for metrics.

        - Until the server knows the mean feature, it sends zeros. Only the network is then trained,
          and the site sends the mean feature of its own samples.
        - Afterwards network and bias are trained. A penalty (``MeanPull``) pulls this site's
          running mean towards the received mean feature. The site sends back the mean feature that
          it received.

        The network is always sent, and the bias is stored at the site.
        """
        network, mean = cast(BiasedNetwork, lab.open()), lab.arrays()[MEAN]
        lab.measure(network)
        if mean.any():
            goal = lab.compute.bring(mean)
            lab.fit(network, objective=MeanPull(network, goal, self.settings).loss)
        else:
            # Not the wrapped one: its bias would learn before there is a mean to stay near
            lab.fit(network.network)
            mean = mean_feature(lab, network)
        sent = exchanged_arrays(network.network) | {MEAN: mean}
        return Outgoing(network, send=sent, keep={BIAS: network.bias.detach()})


def mean_feature(lab: Lab, network: BiasedNetwork) -> Tensor:
    """Compute the mean of the network's tokens over all training samples, (l, c), on the CPU.

    A sample's tokens are the outputs of the encoder: l tokens of c channels. The site's bias is not
    added. The network is put into eval mode and stays in it. No privacy noise is added. There must
    be at least one training sample, which is not checked here.
    """

    def rows(inputs: Tensor) -> Tensor:
        return network.network.encode(inputs).flatten(1)

    # The means of all strata, however small, because only their mean leaves
    means = class_means(network, lab.silo, lab.compute, rows, 1)
    # Weighted by counts, the strata's means give the mean over all samples
    counts = torch.bincount(lab.task.strata(lab.silo.train.labels))
    total = torch.stack([counts[label] * mean for label, mean in means.items()]).sum(dim=0)
    return (total / len(lab.silo.train)).reshape(network.bias.shape)
