"""Each silo alone: the model stays at the site, only metrics leave."""

from torch import Tensor

from fedsilo.client_app.methods.base import (
    Answer,
    Lab,
    SiteMethod,
    SiteNetwork,
    exchanged_arrays,
)
from fedsilo.models.contract.messages import START


class LocalSite(SiteMethod):
    """Continues from its own weights of the round before; the first are the seed's, or sent."""

    measures_what_stays = True

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network from this site's own state, else from what it is to start from."""
        return lab.classifier(lab.state() or lab.arrays(START) or None)

    def train(self, lab: Lab) -> Answer:
        """Train the site's own model and keep it."""
        network = lab.open()
        lab.measure(network)
        lab.fit(network, stays=True)
        return lab.reply(network, send={}, keep=exchanged_arrays(network))


def from_others(lab: Lab) -> dict[str, Tensor]:
    """Return the arrays received, but for what the site starts from."""
    return {name: array for name, array in lab.arrays().items() if not name.startswith(START)}
