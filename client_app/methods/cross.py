"""Train here, test there, at a site: a model of its own, and metrics of every other site's."""

from collections.abc import Iterator

from flwr.app import ArrayRecord
from torch import from_numpy

from fedsilo.client_app.methods.base import Lab, Measured, SiteNetwork, load_exchanged
from fedsilo.client_app.methods.ensemble import EnsembleSite
from fedsilo.client_app.methods.local import LocalSite
from fedsilo.models.contract.messages import ARRAYS, EVALUATE
from fedsilo.models.methods.cross import CROSSED, metric_from
from fedsilo.models.networks.mixture import by_expert
from fedsilo.strategies.wire.records import unpack


class CrossSite(EnsembleSite):
    """Trains alone as ``local`` does; at the end measures all sites' models on its own samples."""

    open = LocalSite.open  # each model received is measured apart

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterator[Measured]:
        """Yield the model that the site keeps, then, at the end, every model received.

        The same samples and dropout draws measure all of them, so that this site's own model has
        its own metrics again, unless it was clipped and noised. An evidential model is measured
        with this site's prior, as a shared model would be.

        Raises:
            SettingError: a model received does not fit the network.
        """
        yield from super().measured(lab, network)
        if lab.instruction.phase != EVALUATE:
            return
        packed = lab.content.array_records.get(ARRAYS, ArrayRecord())
        for site, arrays in by_expert(packed).items():  # one model is unpacked at a time
            load_exchanged(network, {name: from_numpy(unpack(a)) for name, a in arrays.items()})
            yield Measured(network, {metric: metric_from(metric, site) for metric in CROSSED})
