"""The ensemble at a site: an own model, sent after the last round, and the mean of all models."""

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteNetwork, exchanged_arrays
from fedsilo.client_app.methods.local import LocalSite, from_others
from fedsilo.models.networks.mixture import Mixture, open_experts


class EnsembleSite(LocalSite):
    """Trains alone like ``local``; measures the mean of all sites' models once it receives them."""

    trains_stacked = True
    measures_what_stays = False  # the stored model is also sent, so it was trained with noise

    def open(self, lab: Lab) -> SiteNetwork:
        """Build a network that averages the class probabilities of all sites' received models.

        If no models were received, as in a training round, the site's own model is built. It has
        the stored weights or, if none are stored, the initial weights.

        Raises:
            SettingError: the arrays of a model do not fit the network.
        """
        if arrays := from_others(lab):
            experts = open_experts(lab.common, lab.silo.shape, arrays)
            return lab.compute.place(Mixture(experts))
        return super().open(lab)

    def train(self, lab: Lab) -> Outgoing:
        """Train the site's own model, and store it for the next round.

        The training starts from the stored model. The model is measured first, if the server asks
        for metrics. If the server asks for arrays, the trained model is also sent.
        """
        network = lab.open()
        lab.measure(network)
        lab.fit(network)
        return Outgoing(network, keep=exchanged_arrays(network))
