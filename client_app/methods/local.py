"""Each silo alone: the model stays at the site, only metrics leave."""

from collections.abc import Callable

from torch import Tensor

from fedsilo.client_app.methods.base import Answer, Lab, SiteMethod, SiteNetwork, exchanged_arrays
from fedsilo.client_app.training.class_means import class_means
from fedsilo.models.contract.array_names import with_prefix
from fedsilo.models.contract.messages import START


class LocalSite(SiteMethod):
    """Continues from its own weights of the round before; the first are the seed's, or sent."""

    measures_what_stays = True

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network from this site's own state, else from what it is to start from."""
        return lab.classifier(lab.state() or lab.arrays(START) or None)

    def train(self, lab: Lab) -> Answer:
        """Train the site's own model and keep it."""
        network = lab.open()
        lab.measure(network)
        lab.fit(network, stays=True)
        return lab.reply(network, send={}, keep=exchanged_arrays(network))


def reply_by_class(
    lab: Lab, network: SiteNetwork, prefix: str, rows: Callable[[Tensor], Tensor], least: int
) -> Answer:
    """Keep ``network``; send the mean of ``rows`` of each class of at least so many samples.

    ``rows`` maps inputs (batch, *input_shape) to (batch, d); ``prefix`` names the means.
    """
    least = max(least, lab.common.sums_min_count)
    means = class_means(network, lab.silo, lab.compute, rows, least, lab.privacy.means())
    sent = with_prefix(prefix, {str(label): mean for label, mean in means.items()})
    return lab.reply(network, send=sent, keep=exchanged_arrays(network))


def from_others(lab: Lab) -> dict[str, Tensor]:
    """Return the arrays received, but for what the site starts from."""
    return {name: array for name, array in lab.arrays().items() if not name.startswith(START)}
