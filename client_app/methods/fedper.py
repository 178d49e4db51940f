"""FedPer at a site: FedAvg for a part of the network; the other part stays here."""

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork
from fedsilo.core.messages import START
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged


class FedPerSite(SiteMethod):
    """Trains everything, sends the shared arrays, and stores the settings' ``personal`` arrays."""

    trains_stacked = True

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network from the received shared arrays and the site's stored personal arrays.

        A personal array that is not stored, as in the first round, is the initial one that the
        server sent. If the server sent none, it is drawn from the seed.

        Raises:
            SettingError: the received arrays and the stored ones do not fit the network.
        """
        network = lab.classifier(None)
        arrays = exchanged_arrays(network)
        own = arrays | lab.arrays(START) | lab.state()
        joined = {name: array for name, array in lab.arrays().items() if name in arrays}
        for name in self._personal_names(network):
            joined[name] = own[name]
        load_exchanged(network, joined)
        return network

    def train(self, lab: Lab) -> Outgoing:
        """Train the network, send the shared arrays, and store the personal ones.

        The method's setting ``personal`` decides which arrays are personal, such as those of the
        last layer. All others are shared. The network is measured first, if the server asks for
        metrics.
        """
        network = lab.open()
        lab.measure(network)
        self.fit(lab, network)
        arrays = exchanged_arrays(network)
        own = {name: arrays.pop(name) for name in self._personal_names(network)}
        return Outgoing(network, send=arrays, keep=own)

    def fit(self, lab: Lab, network: SiteNetwork) -> None:
        """Train shared and personal arrays together; subclasses override it."""
        lab.fit(network)

    def _personal_names(self, network: SiteNetwork) -> list[str]:
        return list(self.settings.personal(network))
