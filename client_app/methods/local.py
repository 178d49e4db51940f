"""Each silo alone: the model stays at the site, only metrics leave."""

from collections.abc import Iterable

from torch import Tensor

from fedsilo.client_app.methods.base import (
    Answer,
    Lab,
    Measured,
    SiteMethod,
    SiteNetwork,
    exchanged_arrays,
    on_own_labels,
)
from fedsilo.datasets.partition.cuts import UNSEEN
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

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterable[Measured]:
        """Yield the network; of silos of unseen labels, also what it is on the silo's own ones."""
        yield from super().measured(lab, network)
        if lab.common.partition == UNSEEN:
            yield from on_own_labels(lab, network)


def from_others(lab: Lab) -> dict[str, Tensor]:
    """Return the arrays received, but for what the site starts from."""
    return {name: array for name, array in lab.arrays().items() if not name.startswith(START)}
