"""FedAvg+FT at a site: FedAvg, then some rounds alone with a model that stays here."""

from dataclasses import replace

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork, exchanged_arrays
from fedsilo.core.errors import SiteError
from fedsilo.models.methods.fedavg_ft import FedAvgFTSettings


class FedAvgFTSite(SiteMethod):
    """Trains like FedAvg; in rounds that return no arrays, fine-tunes a model that stays here."""

    settings: FedAvgFTSettings
    measures_what_stays = True
    trains_stacked = True

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network with the received weights or, if none were sent, with the stored ones.

        The stored weights are the site's own, fine-tuned model.

        Raises:
            SiteError: no weights were sent and none are stored, because the site missed the round
                in which it would have stored them.
        """
        arrays = lab.arrays() or lab.state()
        if not arrays:
            raise SiteError(
                f"site {lab.site} has no own model, but the message has none: it missed the round "
                "in which it was to train one; resume from before it, or leave the site out"
            )
        return lab.classifier(arrays)

    def train(self, lab: Lab) -> Outgoing:
        """Train the global model and send it, or fine-tune the site's own model and store it.

        The starting model is first measured, if the server asks for metrics. Then it matters
        whether the server expects arrays:

        - If it does, the received global model is trained with the run's settings and sent.
        - If it does not, the site fine-tunes with 'fedavg-ft.finetune-learning-rate', and without
          noise. It starts from the received global model or, if none was sent, from its stored own
          model. The result is stored as the own model and does not leave.

        Raises:
            SiteError: the server expects arrays but sent none, so that the own model would leave.
                There is no model to start from, or the training diverged.
            RefusedError: the hospital's limits forbid the training.
        """
        if lab.instruction.returns and not lab.arrays():
            raise SiteError(
                f"site {lab.site} is asked for weights but received none, and its own model stays: "
                "server and site run different versions of fedsilo"
            )
        network = lab.open()
        lab.measure(network)
        if lab.instruction.returns:
            return self.train_shared(lab, network)
        rate = self.settings.finetune_learning_rate
        lab.fit(network, settings=replace(lab.sampling, learning_rate=rate), stays=True)
        return Outgoing(network, keep=exchanged_arrays(network))

    def train_shared(self, lab: Lab, network: SiteNetwork) -> Outgoing:
        """Train the received global model in place, and return it to be sent to the server."""
        lab.fit(network)
        return Outgoing(network)
