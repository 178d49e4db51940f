"""Each silo trains alone: the model stays at the site, and only metrics leave."""

from collections.abc import Callable

from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork, exchanged_arrays
from fedsilo.client_app.training.site_class_means import class_means
from fedsilo.core.array_names import with_prefix
from fedsilo.core.messages import START


class LocalSite(SiteMethod):
    """Trains its own model from round to round; the first weights are the run's initial ones."""

    measures_what_stays = True
    trains_stacked = True

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network with the stored weights or, if none are stored, with initial weights.

        The initial weights are the ones that the server sent. If it sent none, they are drawn from
        the seed.
        """
        return lab.classifier(lab.state() or lab.arrays(START) or None)

    def train(self, lab: Lab) -> Outgoing:
        """Train the site's own model without noise, and store it for the next round.

        No array leaves the site. If the server asks for metrics, the model is measured before and
        after the training.
        """
        network = lab.open()
        lab.measure(network)
        lab.fit(network, stays=True)
        return Outgoing(network, send={}, keep=exchanged_arrays(network))


def send_class_means(
    lab: Lab, network: SiteNetwork, prefix: str, rows: Callable[[Tensor], Tensor], least: int
) -> Outgoing:
    """Build the reply with each class's mean of a vector per sample, and store ``network``.

    The means are over this site's training samples. A class with fewer than ``least`` or
    'privacy.sums-min-count' samples is left out. In a private run the means get noise, and their
    epsilon is charged to the site's ledger. The reported sample counts then decide which classes
    are left out, not the true ones.

    Args:
        lab: the lab of the message.
        network: the site's own network, which computes the vectors.
        prefix: each mean is sent as ``<prefix><class>``.
        rows: maps inputs (batch, *input_shape) to the vectors (batch, d).
        least: the minimum number of samples of a class.
    """
    least = max(least, lab.common.sums_min_count)
    means = class_means(network, lab.silo, lab.compute, rows, least, lab.privacy.means())
    sent = with_prefix(prefix, {str(label): mean for label, mean in means.items()})
    return Outgoing(network, send=sent, keep=exchanged_arrays(network))


def from_others(lab: Lab) -> dict[str, Tensor]:
    """Return the arrays that come from other sites: all received ones but the initial weights.

    The names of the run's initial weights begin with ``START``.
    """
    return {name: array for name, array in lab.arrays().items() if not name.startswith(START)}
