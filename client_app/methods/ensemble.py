"""The ensemble at a site: a model of its own, sent after the last round, and the mean of all."""

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteNetwork, exchanged_arrays
from fedsilo.client_app.methods.local import LocalSite, from_others
from fedsilo.models.networks.mixture import Mixture, open_experts


class EnsembleSite(LocalSite):
    """Trains alone as ``local`` does; once all experts are known, measures their mean."""

    measures_what_stays = False  # what it keeps is what it sends

    def open(self, lab: Lab) -> SiteNetwork:
        """Return the mean of the experts received, else this site's own model."""
        if arrays := from_others(lab):
            experts = open_experts(lab.common, lab.silo.task, arrays)
            return lab.compute.place(Mixture(experts))
        return super().open(lab)

    def train(self, lab: Lab) -> Outgoing:
        """Train the site's expert, keep it, and send it when it is asked for."""
        network = lab.open()
        lab.measure(network)
        lab.fit(network)
        return Outgoing(network, keep=exchanged_arrays(network))
