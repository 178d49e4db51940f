"""A silo with a model of its own: mix with the neighbours' that came, train, send it, keep it.

The silo keeps its model (``own/<array>``). What it is measured by is the consensus model Theta that
came; its own one is measured once, at the end, as ``own-<metric>``.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedsilo.client_app.methods.base import MeasuredModel, SiteMethod
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.models.contract.array_names import by_site
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import EVALUATE
from fedsilo.models.methods.decentralised import MODEL, NEIGHBOUR, MixingNotes, mixed
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.models.networks.site_network import SiteNetwork

OWN = "own/"
_OWN_METRICS = ("accuracy", "balanced-accuracy", "auc", "loss")


class DecentralisedSite(SiteMethod):
    """Mixes, trains, sends."""

    def open_network(self) -> SiteNetwork:
        """Build the network with Theta if it came, else with the silo's own model."""
        return self.classifier(self.theta() or self.own_model())

    def theta(self) -> dict[str, Tensor]:
        """Return the consensus model's arrays; empty if they did not come."""
        return self.request.arrays(MODEL)

    def own_model(self) -> dict[str, Tensor]:
        """Return the silo's own model; before it has one, Theta, which all silos start from.

        Raises:
            SiteError: it has none, and Theta did not come.
        """
        own = self.own_state(OWN) or self.theta()
        if not own:
            raise SiteError(
                f"site {self.silo.name} has no model of its own and none came to start from: "
                "server and site run different versions of fedsilo"
            )
        return own

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Train from the silo's own start, whatever ``network`` was measured with."""
        load_exchanged(network, self.start())
        return super().local_training(network)

    def start(self) -> dict[str, Tensor]:
        """Return the weighted mean of the silo's own model and those of its neighbours."""
        neighbours = by_site(self.request.arrays(NEIGHBOUR))
        if not neighbours:
            return self.own_model()
        return mixed({**neighbours, self.silo.name: self.own_model()}, self._row())

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the silo's own model."""
        return exchanged_arrays(network)

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return it, to go on from."""
        return {f"{OWN}{name}": array for name, array in self.outgoing(network).items()}

    def clip_reference(self) -> dict[str, Tensor]:
        """Return Theta: what the server knows of the silo's model without the silo."""
        return self.theta()

    def measured(self, network: SiteNetwork) -> Iterator[MeasuredModel]:
        """Yield the network, and at the end the silo's own model too."""
        yield MeasuredModel(network)
        own = self.own_state(OWN)
        if own and self.request.instruction.phase == EVALUATE:
            load_exchanged(network, own)
            yield MeasuredModel(network, {metric: f"own-{metric}" for metric in _OWN_METRICS})

    def _row(self) -> dict[str, float]:
        """Return the silo's row of the mixing matrix."""
        mixing = MixingNotes.from_values(self.request.instruction.notes).mixing
        row = {str(site): float(weight) for site, weight in mixing.items()}
        if self.silo.name not in row:
            raise SiteError(
                f"the mixing weights that came to site {self.silo.name} are of {sorted(row)}: "
                "server and site run different versions of fedsilo"
            )
        return row
