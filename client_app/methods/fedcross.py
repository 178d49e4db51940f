"""FedCross at a site: measure the mean of all models, and train the model drawn for this site."""

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, load_exchanged
from fedsilo.models.methods.decentralised import MODEL


class FedCrossSite(SiteMethod):
    """Trains the received model, and keeps nothing."""

    trains_stacked = True

    def train(self, lab: Lab) -> Outgoing:
        """Train the model that the server drew for this site, and send it back.

        If the message also has the mean of all models, the mean is measured first, if the server
        asks for metrics. Without the mean nothing is measured before the training. Nothing is
        stored.
        """
        network = lab.open()
        mean = lab.arrays(MODEL)
        # Rounds without measurements save the traffic of a second model
        if mean:
            drawn = {name: a for name, a in lab.arrays().items() if not name.startswith(MODEL)}
            load_exchanged(network, mean)
            lab.measure(network)
            load_exchanged(network, drawn)
        lab.fit(network)
        return Outgoing(network)
