"""Ditto at a site: it trains and sends the global model, trains its own near it and keeps that."""

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork, exchanged_arrays
from fedsilo.client_app.methods.fedprox import proximal
from fedsilo.models.methods.ditto import DittoSettings


class DittoSite(SiteMethod):
    """Has two models; its own is measured."""

    settings: DittoSettings
    measures_what_stays = True

    def open(self, lab: Lab) -> SiteNetwork:
        """Open the site's own model, which begins as the first global one received."""
        return lab.classifier(lab.state() or lab.arrays())

    def train(self, lab: Lab) -> Outgoing:
        """Train the global model, then the site's own near the received one, as long."""
        own, shared = lab.open(), lab.classifier(lab.arrays())
        lab.measure(own)
        near = proximal(own, self.settings.personal_lambda, lab.arrays())
        lab.fit(shared, aside=("global",))
        lab.fit(own, penalty=near, stays=True)
        return Outgoing(own, send=exchanged_arrays(shared), keep=exchanged_arrays(own))
