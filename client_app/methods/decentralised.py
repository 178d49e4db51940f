"""A silo with a model of its own: mix with the neighbours' that came, train, send it, keep it.

The silo keeps its model (``own/<array>``). What it is measured by is the consensus model Theta that
came; its own one is measured once, at the end, as ``own-<metric>``.
"""

from __future__ import annotations

import json
from typing import cast

from torch import Tensor, nn

from client_app.methods.base import SiteMethod
from models.contract.array_names import arrays_below, by_site
from models.contract.errors import SiteError
from models.contract.messages import EVALUATE, INCOMING, measurement, measurements
from models.contract.settings_schema import Value
from models.methods.decentralised import MIXING, MODEL, NEIGHBOUR, LinkSettings, mixed
from models.networks.exchanged import exchanged_arrays, load_exchanged
from models.networks.site_network import SiteNetwork

OWN = "own/"
_OWN_METRICS = ("accuracy", "balanced-accuracy", "auc", "loss")


class DecentralisedSite(SiteMethod):
    """Mixes, trains, sends."""

    settings_class = LinkSettings

    def open_network(self) -> SiteNetwork:
        """Build the network with Theta if it came, else with the silo's own model."""
        return self.classifier(self.theta() or self.own_model())

    def theta(self) -> dict[str, Tensor]:
        """Return the consensus model's arrays; empty if they did not come."""
        return self.came_below(MODEL)

    def came_below(self, prefix: str) -> dict[str, Tensor]:
        """Return the arrays of the message whose names begin so, without the prefix."""
        return arrays_below(prefix, self.request.arrays())

    def own_model(self) -> dict[str, Tensor]:
        """Return the silo's own model; before it has one, Theta, which all silos start from.

        Raises:
            SiteError: it has none, and Theta did not come.
        """
        found = self.stored_under(OWN) or self.theta()
        if not found:
            raise SiteError(
                f"site {self.silo.name} has no model of its own and none came to start from: "
                "server and site run different versions of fedsilo"
            )
        return found

    def fit(self, network: SiteNetwork) -> float:
        """Train from the silo's own start, whatever ``network`` was measured with."""
        load_exchanged(cast(nn.Module, network), self.start())
        return super().fit(network)

    def start(self) -> dict[str, Tensor]:
        """Return the weighted mean of the silo's own model and those of its neighbours."""
        neighbours = by_site(self.came_below(NEIGHBOUR))
        if not neighbours:
            return self.own_model()
        return mixed({**neighbours, self.silo.name: self.own_model()}, self._row())

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the silo's own model."""
        return exchanged_arrays(cast(nn.Module, network))

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return it, to go on from."""
        return {f"{OWN}{name}": array for name, array in self.outgoing(network).items()}

    def dp_reference(self) -> dict[str, Tensor]:
        """Return Theta: what the server knows of the silo's model without the silo."""
        return self.theta()

    def measured(
        self, network: SiteNetwork, model: str, splits: tuple[str, ...]
    ) -> dict[str, float]:
        """Measure; at the end the silo's own model too."""
        found = super().measured(network, model, splits)
        if self.request.instruction.phase != EVALUATE or not self.stored_under(OWN):
            return found
        load_exchanged(cast(nn.Module, network), self.stored_under(OWN))
        own = super().measured(network, model, splits)
        return found | {
            measurement(INCOMING, split, f"own-{metric}"): value
            for _, split, metric, value in measurements(own)
            if metric in _OWN_METRICS
        }

    def _row(self) -> dict[str, float]:
        """Return the silo's row of the mixing matrix."""
        told: Value = self.request.instruction.notes.get(MIXING, "{}")
        row = {str(site): float(weight) for site, weight in json.loads(str(told)).items()}
        if self.silo.name not in row:
            raise SiteError(
                f"the mixing weights that came to site {self.silo.name} are of {sorted(row)}: "
                "server and site run different versions of fedsilo"
            )
        return row
