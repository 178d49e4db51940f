"""DisTrans (Yuan et al. 2022): FedAvg of two-channel networks, with offsets for the sites.

Messages in both directions: FedAvg's, with twice the inputs in the last layer, and
``offset.weight`` (pixels, 1), float32. The offset sent to a site is the mean of all offsets, or one
that the server computes from the site's class shares with an embedding. With ``offset-aggregation``
"none" no offset crosses the wire.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsilo.core.array_names import arrays_below, with_prefix
from fedsilo.core.messages import TRAIN
from fedsilo.models.methods.distrans import (
    EMBEDDING_LEARNING_RATE,
    OFFSET,
    OFFSETS,
    DisTransSettings,
    OffsetEmbedding,
    build_embedding,
    double_channels,
    from_pixels,
    to_pixels,
)
from fedsilo.strategies.loop.method import (
    Arrays,
    Ask,
    Disclosures,
    Reply,
    State,
    initial_weights,
    starting_network,
)
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.wire.records import NDArray

_EMBEDDING = "embedding/"


class DisTrans(FedAvg):
    """Averages the trained networks, and combines the offsets that shift the sites' images."""

    settings: DisTransSettings
    beside = (_EMBEDDING,)  # the embedding never leaves the server
    capabilities = replace(
        FedAvg.capabilities, vit=False, tables=False, some_sites=False, updates=False
    )

    def disclosures(self) -> Disclosures:
        """List the data that a site sends: the weights and, in most cases, an offset.

        The offset is an array as large as an image, by which the site's images are shifted. If
        'offset-aggregation' is "none", the offset stays at the site and is not listed.
        """
        network = super().disclosures()
        if self.settings.offset_aggregation == "none":
            return network
        return network.also(
            "the site's offset, each round: an array as large as an image, which differs from the "
            "received offset by a sum of gradients at the pixels of its training images"
        )

    def initial_state(self) -> State:
        """Return the initial weights of DisTrans's network, and the initial offsets.

        The network sees each image twice, shifted towards an offset and away from it. It is built
        from FedAvg's initial network (``double_channels``). The setting 'offset-aggregation' says
        which offsets the state has:

        - "mean": one random offset for all sites.
        - "embedding": one per site. An embedding network, whose weights the state has too, computes
          it from the share of each class in the site's samples.
        - "none": no offset.
        """
        single, shape = starting_network(self.common, self.shape), self.shape
        network = double_channels(single, self.common, shape.input_shape)
        arrays = initial_weights(network)
        if self.settings.offset_aggregation == "none":
            del arrays[OFFSET]
        if self.settings.offset_aggregation == "embedding":
            pixels = len(arrays.pop(OFFSET))
            embedding = build_embedding(self.common.seed, shape.outputs, pixels)
            arrays |= self._embedding_arrays(embedding)
        return State(arrays)

    def round(self, state: State, ask: Ask) -> State:
        """Let each asked site train the network and its offset, and combine the replies.

        An offset is an array as large as an image, by which images are shifted. The networks are
        averaged by 'server.aggregation'. The setting 'offset-aggregation' decides about the
        offsets:

        - "mean": the offsets are averaged like the networks, into one for all sites.
        - "embedding": an embedding network learns from each returned offset in turn
          (``_fit_embedding``). It then computes new offsets for all sites.
        - "none": sites keep their offsets and return only networks.
        """
        trained = ask(TRAIN, {site: self.model_for(site, state) for site in ask.sites})
        arrays = self.average(trained, _network(state.arrays))
        if self.settings.offset_aggregation == "embedding":
            arrays |= self._embedding_arrays(self._fit_embedding(state, trained))
        return replace(state, arrays=arrays)

    def model_for(self, site: str, state: State) -> Arrays:
        """Return the network and the offset for ``site``, to measure or to train them.

        An offset is an array as large as an image, by which the site's images are shifted. The
        setting 'offset-aggregation' says which offset is returned:

        - "mean": the offset that all sites share.
        - "embedding": the site's own. A site without one in the state gets only the network.
        - "none": no offset, because each site keeps its own.
        """
        network = _network(state.arrays)
        own = state.arrays.get(f"{OFFSETS}{site}")
        if own is not None:
            network[OFFSET] = own
        return network

    def _fit_embedding(self, state: State, replies: Mapping[str, Reply]) -> OffsetEmbedding:
        """Return the embedding network after one step of SGD towards each returned offset.

        This network computes a site's offset from the share of each class in its samples. The loss
        is the mean squared difference, and the learning rate is ``EMBEDDING_LEARNING_RATE``. The
        steps follow the order of site names, in float64. They start from the weights in ``state``,
        which do not change.
        """
        some_offset = state.arrays[f"{OFFSETS}{self.participants.sites()[0]}"]
        classes = self.shape.outputs
        embedding = build_embedding(self.common.seed, classes, len(some_offset))
        weights = {}
        for name, array in arrays_below(_EMBEDDING, state.arrays).items():
            # float64, because many steps on a small network add up
            weights[name] = torch.from_numpy(np.array(array, np.float64))
        embedding.load_state_dict(weights)
        # Sorted, because each step starts from the weights that the step before has changed
        for site, reply in sorted(replies.items()):
            offset = torch.from_numpy(reply.arrays[OFFSET].astype(np.float64))
            wanted = from_pixels(offset, self.common)
            embedding.fit(self._class_shares(site), wanted, EMBEDDING_LEARNING_RATE)
        return embedding

    def _embedding_arrays(self, embedding: OffsetEmbedding) -> dict[str, NDArray]:
        """Return the embedding network's weights and the offset of each site, all float32.

        The network computes an offset from the share of each class in the site's samples. All sites
        of the run get one, named ``offset/<site>``. The weights are named ``embedding/<name>``.
        """
        tensors: dict[str, Tensor] = with_prefix(_EMBEDDING, embedding.state_dict())
        with torch.no_grad():
            for site in self.participants.sites():
                offset = to_pixels(embedding(self._class_shares(site)), self.common)
                tensors[f"{OFFSETS}{site}"] = offset
        return {name: tensor.float().numpy() for name, tensor in tensors.items()}

    def _class_shares(self, site: str) -> Tensor:
        """Return the share of each class in a site's training samples, (classes,), float64."""
        counts = torch.tensor(self.participants.facts[site].label_counts["train"])
        return counts.double() / counts.sum()


def _network(arrays: Arrays) -> dict[str, NDArray]:
    """Return the arrays that are averaged over sites: the network and an offset that all share.

    The offsets of single sites and the embedding that computes them are left out.
    """
    return {n: array for n, array in arrays.items() if not n.startswith((_EMBEDDING, OFFSETS))}
