"""Ditto at a site: train and send the global model; train an own model near it and store that."""

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork, exchanged_arrays
from fedsilo.client_app.methods.fedprox import proximal
from fedsilo.models.methods.ditto import DittoSettings


class DittoSite(SiteMethod):
    """Trains the global model, which it sends, and its own model, which is measured and stored."""

    settings: DittoSettings
    measures_what_stays = True
    trains_stacked = True

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the site's own model, which starts as the first received global model."""
        return lab.classifier(lab.state() or lab.arrays())

    def train(self, lab: Lab) -> Outgoing:
        """Train the global model to be sent, and then the site's own model near received weights.

        The own model's loss has a penalty: 'ditto.personal-lambda' / 2 times the squared distance
        from the received weights. The own model continues from its stored weights, or from the
        received weights if none is stored. The own model stays at the site, so it is trained
        without noise even in a private run. If the server asks for metrics, only the own model is
        measured, before and after its training. Only the global model is sent, and only the own
        model is stored.
        """
        own, shared = lab.open(), lab.classifier(lab.arrays())
        lab.measure(own)
        near = proximal(own, self.settings.personal_lambda, lab.arrays())
        # The own model is trained last, so that the reply measures it
        lab.fit(shared, aside=("global",))
        lab.fit(own, penalty=near, stays=True)
        return Outgoing(own, send=exchanged_arrays(shared), keep=exchanged_arrays(own))
