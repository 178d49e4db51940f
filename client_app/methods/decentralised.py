"""A silo with its own model, which it mixes with its neighbours', trains, sends and stores.

Ring and MATCHA need nothing else, because only the server knows the neighbours. The own model is
stored as ``own/<array>``. In each round the silo measures the received consensus model (Theta, the
mean of the silos' models). It measures its own model once, at the end, as ``own-<metric>``.
"""

from collections.abc import Iterator

from torch import Tensor

from fedsilo.client_app.methods.base import (
    Lab,
    Measured,
    Outgoing,
    SiteMethod,
    SiteNetwork,
    on_own_labels,
)
from fedsilo.core.array_names import by_site, with_prefix
from fedsilo.core.errors import SiteError
from fedsilo.core.messages import EVALUATE
from fedsilo.models.methods.decentralised import MODEL, NEIGHBOUR, MixingNotes, mix_models
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged

OWN = "own/"
_OWN_METRICS = ("accuracy", "balanced-accuracy", "auc", "loss")


class DecentralisedSite(SiteMethod):
    """Mixes its own model with its neighbours', trains it and sends it."""

    trains_stacked = True

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network with the received mean of all silos' models, or the silo's own model.

        The mean is not in every message. Without it, the silo's own model is used, which it stored
        in its last round.

        Raises:
            SiteError: the server sent no mean model, and the silo has no stored model.
        """
        return lab.classifier(lab.arrays(MODEL) or own_model(lab))

    def train(self, lab: Lab) -> Outgoing:
        """Train from a mixture of the silo's own and its neighbours' models, and send the result.

        If the server asks for metrics, the model of ``open`` is measured first: the received mean
        of all silos' models or, without it, the silo's own model. The trained model is sent to the
        server, and is stored as the silo's own model for the next round.

        Raises:
            SiteError: there is no own model to start from, a mixing weight is missing, or the
                training diverged.
            RefusedError: the hospital's limits forbid the training.
            SettingError: a received or stored model does not fit the network.
        """
        network = lab.open()
        lab.measure(network)
        load_exchanged(network, self._start(lab))
        lab.fit(network)
        return send_and_keep(network)

    def _start(self, lab: Lab) -> dict[str, Tensor]:
        """Return the weights to train from: the silo's own model mixed with its neighbours' models.

        The own model is the stored one or, if none is stored, the received mean model. The message
        has the neighbours' models and the weight of each model in the mixture. If the message has
        no neighbours' models, the own model is returned unchanged.

        Raises:
            SiteError: there is neither a stored nor a received model, or neighbours' models came
                without a weight for this silo.
        """
        neighbours = by_site(lab.arrays(NEIGHBOUR))
        if not neighbours:
            return own_model(lab)
        return mix_models({**neighbours, lab.site: own_model(lab)}, _mixing_row(lab))

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterator[Measured]:
        """Yield the network once for each model to measure: the mean model, then the silo's own.

        First ``network`` is yielded as it was opened, usually with the mean of the silos' models.
        In the final evaluation, a silo that has stored its own model goes on:

        - ``network`` is loaded with the own model and yielded again, for accuracy, balanced
          accuracy, AUC and loss, which are reported as ``own-<metric>``.
        - If some test samples have labels that the silo never trained on, the own model is yielded
          once more, to be measured only on the labels that it was trained on.

        Measure each model before requesting the next, because all of them are the same object.
        """
        yield from super().measured(lab, network)
        if lab.instruction.phase == EVALUATE and (own := lab.state(OWN)):
            load_exchanged(network, own)
            yield Measured(network, {metric: f"own-{metric}" for metric in _OWN_METRICS})
            yield from on_own_labels(lab, network)


def send_and_keep(network: SiteNetwork, keep: dict[str, Tensor] | None = None) -> Outgoing:
    """Return an ``Outgoing`` (what leaves a site, and what stays) that sends and stores a model.

    Args:
        network: the silo's own model after training. It is sent, and its arrays are stored under
            ``own/<array>``.
        keep: further arrays to store, under the names that they have here. With None only the
            model is stored.
    """
    own = with_prefix(OWN, exchanged_arrays(network))
    return Outgoing(network, keep=own | (keep or {}))


def own_model(lab: Lab) -> dict[str, Tensor]:
    """Return the silo's stored model; if none is stored, the mean model that the server sent.

    In the silo's first round the mean model is the initial model that all silos share.

    Raises:
        SiteError: the silo has no stored model, and the server sent none.
    """
    own = lab.state(OWN) or lab.arrays(MODEL)
    if not own:
        raise SiteError(
            f"site {lab.site} has no own model, but the message has none to start from: "
            "server and site run different versions of fedsilo"
        )
    return own


def _mixing_row(lab: Lab) -> dict[str, float]:
    """Read the weights with which this silo mixes its model and its neighbours': site -> weight.

    The server sends them in the message's notes. They are the silo's row of the mixing matrix.

    Raises:
        SiteError: the row has no weight for this silo. A neighbour's weight may be missing.
    """
    mixing = MixingNotes.from_values(lab.instruction.notes).mixing
    row = {str(site): float(weight) for site, weight in mixing.items()}
    if lab.site not in row:
        raise SiteError(
            f"site {lab.site} received mixing weights only for {sorted(row)}, not for itself: "
            "server and site run different versions of fedsilo"
        )
    return row
