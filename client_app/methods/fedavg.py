"""FedAvg at a site (McMahan et al. 2017): train the global model and send it back."""

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod


class FedAvgSite(SiteMethod):
    """Receives and sends every parameter and float buffer of the network."""

    trains_stacked = True

    def train(self, lab: Lab) -> Outgoing:
        """Train the received global model on this silo's data, and send the trained model.

        The received model is measured first, if the server asks for metrics. Batch norm's
        statistics are sent too.
        """
        network = lab.open()
        lab.measure(network)
        lab.fit(network)
        return Outgoing(network)
