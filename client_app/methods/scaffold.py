"""SCAFFOLD at a site: FedAvg with corrected gradients; the site keeps its control variate."""

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, exchanged_arrays
from fedsilo.client_app.training.terms import GradientSum, Term
from fedsilo.core import messages
from fedsilo.core.array_names import is_statistic, with_prefix
from fedsilo.models.methods.fedprox import linear_term
from fedsilo.models.methods.scaffold import CONTROL, INVERSE_STEPS


class SCAFFOLDSite(SiteMethod):
    """Trains like FedAvg, and adds c - c_i to each gradient."""

    trains_stacked = True

    def train(self, lab: Lab) -> Outgoing:
        """Train with corrected gradients, and send the mean update per step and a control variate.

        The received model is measured first, if the server asks for metrics. c is the server's
        control variate and c_i this site's, both in units of learning rate times gradient. The
        server may not have used every reply. The old c_i was stored with the last reply that it did
        use, and is 0 if there is none. Each step adds (c - c_i) / learning rate to the gradient.
        The new c_i is the learning rate times the mean gradient of these steps without this
        addition. It is stored. The reply has:

        - received + (trained - received) / steps for each weight, and batch norm's statistics as
          trained,
        - c plus the new c_i minus the old c_i,
        - 1 / steps as a metric.
        """
        network, rate, received = lab.open(), lab.common.learning_rate, lab.arrays()
        lab.measure(network)
        control, before = lab.arrays(CONTROL), lab.counted_state()
        correction = {name: c - before.get(name, 0) for name, c in control.items()}
        trained, slopes = {}, []
        for name, parameter in network.named_parameters():
            if name in control:
                trained[name] = parameter
                # Control variates are in units of rate * gradient, but the loss's linear term needs
                # gradients
                slopes.append((correction[name] / rate).to(parameter.device))
        gradients = GradientSum(trained)
        lab.fit(network, penalty=Term(linear_term, trained, (slopes,)), after_step=gradients)
        steps = lab.work[messages.STEPS]
        # The recorded gradients include the correction
        own, moved = {}, {}
        for name, total in gradients.sums.items():
            own[name] = rate * total.cpu() / steps - correction[name]
        for name, c in control.items():
            moved[name] = c + own[name] - before.get(name, 0)
        sent = with_prefix(CONTROL, moved)
        for name, array in exchanged_arrays(network).items():
            sent[name] = array
            if not is_statistic(name):
                sent[name] = received[name] + (array.cpu() - received[name]) / steps
        lab.metrics[INVERSE_STEPS] = 1 / steps
        return Outgoing(network, send=sent, keep=own)
