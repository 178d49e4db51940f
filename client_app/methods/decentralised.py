"""A silo with its own model, which it mixes with its neighbours', trains, sends and keeps.

Ring and MATCHA are this and no more: who its neighbours are is the server's knowledge. The silo
keeps its model (``own/<array>``). It is measured by the consensus model Theta received; its own
one is measured once, at the end, as ``own-<metric>``.
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
from fedsilo.models.contract.array_names import by_site, with_prefix
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import EVALUATE
from fedsilo.models.methods.decentralised import MODEL, NEIGHBOUR, MixingNotes, mix_models
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged

OWN = "own/"
_OWN_METRICS = ("accuracy", "balanced-accuracy", "auc", "loss")


class DecentralisedSite(SiteMethod):
    """Mixes, trains, sends."""

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network with Theta if it came, else with the silo's own model."""
        return lab.classifier(lab.arrays(MODEL) or own_model(lab))

    def train(self, lab: Lab) -> Outgoing:
        """Measure Theta, then train from the silo's own start."""
        network = lab.open()
        lab.measure(network)
        load_exchanged(network, self._start(lab))
        lab.fit(network)
        return send_and_keep(network)

    def _start(self, lab: Lab) -> dict[str, Tensor]:
        """Return the weighted mean of the silo's own model and those of its neighbours."""
        neighbours = by_site(lab.arrays(NEIGHBOUR))
        if not neighbours:
            return own_model(lab)
        return mix_models({**neighbours, lab.site: own_model(lab)}, _mixing_row(lab))

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterator[Measured]:
        """Yield the network, and at the end the silo's own model too.

        Where test samples have labels that the silo never saw it is measured on its own labels too.
        """
        yield from super().measured(lab, network)
        if lab.instruction.phase == EVALUATE and (own := lab.state(OWN)):
            load_exchanged(network, own)
            yield Measured(network, {metric: f"own-{metric}" for metric in _OWN_METRICS})
            yield from on_own_labels(lab, network)


def send_and_keep(network: SiteNetwork, keep: dict[str, Tensor] | None = None) -> Outgoing:
    """Send the silo's own model, and keep it for the next round together with ``keep``."""
    own = with_prefix(OWN, exchanged_arrays(network))
    return Outgoing(network, keep=own | (keep or {}))


def own_model(lab: Lab) -> dict[str, Tensor]:
    """Return the silo's own model; before it has one, Theta, which all silos start from.

    Raises:
        SiteError: it has none, and Theta did not come.
    """
    own = lab.state(OWN) or lab.arrays(MODEL)
    if not own:
        raise SiteError(
            f"site {lab.site} has no model of its own and none came to start from: "
            "server and site run different versions of fedsilo"
        )
    return own


def _mixing_row(lab: Lab) -> dict[str, float]:
    """Return the silo's row of the mixing matrix."""
    mixing = MixingNotes.from_values(lab.instruction.notes).mixing
    row = {str(site): float(weight) for site, weight in mixing.items()}
    if lab.site not in row:
        raise SiteError(
            f"the mixing weights received to site {lab.site} are of {sorted(row)}: "
            "server and site run different versions of fedsilo"
        )
    return row
