"""DisTrans at a site: train the two-channel network and, with SGD, the offset of its inputs.

With ``offset-aggregation`` "none" the offset (``offset.weight``) is state of the site, first drawn
from the site's own seed, and is neither received nor sent.
"""

from typing import cast

import torch
from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.client_app.training.optimisers import eager
from fedsilo.models.methods.distrans import (
    OFFSET,
    OFFSETS,
    DisTransSettings,
    DoubleChannelClassifier,
    double_channels,
)
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged


class DisTransSite(SiteMethod):
    """Receives and sends the network. The offset is exchanged too, or stays at the site."""

    settings: DisTransSettings

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the two-channel network, on the compute device, with the received weights.

        The offset t is a trained array of the image's size. The first channel sees an image x as
        x - a (x - t), the second as x + a (x - t), where a is a constant. The last layer reads the
        features of both channels, so it has twice as many inputs. With
        'distrans.offset-aggregation' "none", the offset is the site's stored one. In the site's
        first round it is drawn from the site's own seed. With any other value the offset is
        received.

        Raises:
            SettingError: the last layer has no form that can be doubled, or the arrays do not fit
                the network.
        """
        single, shape = (
            initial_classifier(lab.common, lab.silo, lab.task),
            lab.silo.shape.input_shape,
        )
        network = double_channels(single, lab.sampling, shape, lab.site)
        load_exchanged(network, self._weights(lab, network))
        return lab.compute.place(network)

    def train(self, lab: Lab) -> Outgoing:
        """Train the network and the offset of its input images together, and send the network.

        An offset is a trained array that shifts the images. In each step the run's optimiser
        changes the network, and SGD with 'distrans.offset-learning-rate' changes the offset. Both
        use the gradients of the same backward pass. The received model is measured first, if the
        server asks for metrics.

        If 'distrans.offset-aggregation' is "none", the offset is stored at the site. Otherwise it
        is sent with the network.
        """
        network = cast(DoubleChannelClassifier, lab.open())
        lab.measure(network)
        rate = self.settings.offset_learning_rate
        lab.fit(network, beside=eager(torch.optim.SGD)(network.apart_parameters(), lr=rate))
        arrays = exchanged_arrays(network)
        if not self._stays():
            return Outgoing(network, send=arrays)
        return Outgoing(network, keep={OFFSET: arrays.pop(OFFSET)}, send=arrays)

    def _stays(self) -> bool:
        return self.settings.offset_aggregation == "none"

    def _weights(self, lab: Lab, network: DoubleChannelClassifier) -> dict[str, Tensor]:
        """Return the received arrays with this site's offset, and without the other sites' offsets.

        An offset is a trained array that shifts a site's input images. If offsets stay at the
        sites, the site's stored offset is used. If none is stored, it is the offset that
        ``network`` was built with.

        If offsets are exchanged, the received offset is used. A finished run's model has one offset
        for each site, and this site's is taken.
        """
        arrays = lab.arrays()
        if self._stays():
            return arrays | {OFFSET: network.offset.weight.detach()} | lab.state()
        own = arrays.get(f"{OFFSETS}{lab.site}")  # only a finished run's model has offsets by site
        named = {n: array for n, array in arrays.items() if not n.startswith(OFFSETS)}
        return named if own is None else named | {OFFSET: own}
