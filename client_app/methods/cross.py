"""Train here, test there, at a site: a model of its own, and figures of every other site's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, from_numpy, nn

from client_app.methods.local import LocalSite
from models.contract.messages import ARRAYS, INCOMING, measurement, measurements
from models.methods.cross import CROSSED, metric_from
from models.networks.exchanged import exchanged_arrays, load_exchanged
from models.networks.mixture import EXPERT
from models.networks.site_network import SiteNetwork

_SPLITS = ("val", "test")


class CrossSite(LocalSite):
    """Trains alone as ``local`` does; at the end measures all sites' models on its own samples."""

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the site's own model, when it is asked for."""
        return exchanged_arrays(cast(nn.Module, network))

    def measure_only(self) -> RecordDict:
        """Measure the model that the site keeps, then every model that came, and reply.

        The same samples and dropout draws measure all of them, so that what came of this site has
        its own figures again, unless it was clipped and noised. An evidential model is measured
        with this site's prior, as a shared model would be.

        Raises:
            SettingError: a model that came does not fit the network.
        """
        network = self.open_network()
        metrics = self.measured(network, INCOMING, _SPLITS)
        for site, arrays in self._models():
            load_exchanged(cast(nn.Module, network), arrays)
            metrics |= {
                measurement(model, split, metric_from(metric, site)): value
                for model, split, metric, value in measurements(
                    self.measured(network, INCOMING, _SPLITS)
                )
                if metric in CROSSED
            }
        return self.reply(metrics)

    def _models(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the models that came, sorted by site; only one is unpacked at a time."""
        packed = self.request.content.array_records.get(ARRAYS, ArrayRecord())
        names: dict[str, dict[str, str]] = {}
        for key in packed:
            # A site's name may hold a '/', a network's arrays do not
            site, _, name = key.removeprefix(EXPERT).rpartition("/")
            names.setdefault(site, {})[name] = key
        for site, keys in sorted(names.items()):
            yield (
                site,
                {name: from_numpy(packed[key].numpy().copy()) for name, key in keys.items()},
            )
