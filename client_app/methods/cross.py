"""Cross at a site: train a model alone, and measure every other site's model."""

from collections.abc import Iterator

from flwr.app import ArrayRecord
from torch import from_numpy

from fedsilo.client_app.methods.base import Lab, Measured, SiteNetwork, load_exchanged
from fedsilo.client_app.methods.ensemble import EnsembleSite
from fedsilo.client_app.methods.local import LocalSite
from fedsilo.core.messages import ARRAYS, EVALUATE
from fedsilo.models.methods.cross import crossed_metrics, metric_from
from fedsilo.models.networks.mixture import by_expert
from fedsilo.strategies.wire.records import unpack


class CrossSite(EnsembleSite):
    """Trains alone like ``local``; at the end measures all sites' models on its own samples."""

    trains_stacked = True
    open = LocalSite.open  # each received model is measured separately

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterator[Measured]:
        """Yield the site's own model and, in the final evaluation, then each received model.

        The site's own model is measured with all its metrics. Each received model is measured on
        the same samples, with only the metrics of ``crossed_metrics``, such as accuracy. Their
        names are ``<metric>-from-<site>``. The received models come in the order of their sites'
        names, and this site's own model is among them.

        The same ``network`` is loaded with one model after another, so measure each before
        requesting the next.

        Raises:
            SettingError: a received model does not fit the network.
        """
        yield from super().measured(lab, network)
        if lab.instruction.phase != EVALUATE:
            return
        metrics = crossed_metrics(lab.task.name)
        packed = lab.content.array_records.get(ARRAYS, ArrayRecord())
        # Unpacks one model at a time to limit memory
        for site, arrays in by_expert(packed).items():
            # The same object is reused, because ``Lab`` measures each network before it asks for
            # the next
            load_exchanged(network, {name: from_numpy(unpack(a)) for name, a in arrays.items()})
            yield Measured(network, {metric: metric_from(metric, site) for metric in metrics})
