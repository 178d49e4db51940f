"""FedNova at a site: FedAvg, but the update that is sent is divided by the number of steps."""

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, exchanged_arrays
from fedsilo.core import messages
from fedsilo.core.array_names import is_statistic
from fedsilo.models.methods.fednova import STEPS


class FedNovaSite(SiteMethod):
    """Trains like FedAvg, and divides its update by its number of steps before it is sent."""

    trains_stacked = True

    def train(self, lab: Lab) -> Outgoing:
        """Train the global model; send the received weights plus the mean update per step.

        The received model is measured first, if the server asks for metrics. The site sends
        received + (trained - received) / steps for each weight, and the number of optimiser steps
        as the metric ``STEPS``. Batch-norm statistics are sent as trained. The method stores no
        arrays at the site.
        """
        network, received = lab.open(), lab.arrays()
        lab.measure(network)
        # Counted, not computed: in fp16 a step with infinite gradients is skipped
        lab.fit(network)
        steps = lab.work[messages.STEPS]
        sent = exchanged_arrays(network)
        # Batch norm's statistics are means already, so only weights are divided by the steps
        for name in [name for name in sent if not is_statistic(name)]:
            sent[name] = received[name] + (sent[name].cpu() - received[name]) / steps
        lab.metrics[STEPS] = steps
        return Outgoing(network, send=sent)
