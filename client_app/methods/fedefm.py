"""FedEFM at a silo: train the neighbours' models on its data, then distil its own from theirs.

Its private state is that of every decentralised method: ``own/<array>``.
"""

from typing import cast

from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, TokenClassifier
from fedsilo.client_app.methods.decentralised import DecentralisedSite, own_model, send_and_keep
from fedsilo.client_app.training.loop import Objective
from fedsilo.core.array_names import by_site, with_prefix
from fedsilo.core.errors import SiteError
from fedsilo.core.messages import TRAINED, measurement
from fedsilo.models.methods.cross import metric_from
from fedsilo.models.methods.decentralised import MODEL, NEIGHBOUR, mix_models
from fedsilo.models.methods.fedefm import (
    CLOSENESS,
    EXPERT,
    OVERSEAS,
    VISITOR,
    FedEFMSettings,
    multishot_loss,
)
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged


class FedEFMSite(DecentralisedSite):
    """Trains its neighbours' models, and distils its own from copies that neighbours trained."""

    settings: FedEFMSettings
    phases = ("train", "overseas", "distil")

    def overseas(self, lab: Lab) -> Outgoing:
        """Train each visiting model on this silo's data (eq. 1), and send it to the server.

        A visiting model is another silo's model, which the server sent here to be trained. Its
        training takes 'fedefm.overseas-steps' steps with the usual loss. Each trained model is sent
        under the name of the silo that it came from. Nothing is stored here.
        """
        returned: dict[str, Tensor] = {}
        for owner, trained in self._train_models(lab, VISITOR).items():
            returned |= with_prefix(f"{VISITOR}{owner}/", trained)
        return Outgoing(send=returned)

    def _train_models(self, lab: Lab, prefix: str) -> dict[str, dict[str, Tensor]]:
        """Train each model received under ``prefix``, and return owner -> array name -> array.

        The owner is the silo that the model came from. The received names are
        ``<prefix><owner>/<array>``. Each training takes 'fedefm.overseas-steps' steps, and its loss
        is not reported. The mapping is empty if no models were received.
        """
        trained = {}
        for owner, arrays in by_site(lab.arrays(prefix)).items():
            visitor = lab.classifier(arrays)
            lab.fit(visitor, steps=self.settings.overseas_steps, aside=(OVERSEAS, owner))
            trained[owner] = exchanged_arrays(visitor)
        return trained

    def distil(self, lab: Lab) -> Outgoing:
        """Train the silo's own model by distillation from the copies that neighbours have trained.

        If the server asks for metrics, the received mean of the silos' models or, without it, the
        silo's own model is measured first. The training starts from the weights of ``_start``, and
        its loss is that of ``_distillation_loss``. Without received copies, as in round 1, the
        network's usual loss is used. The trained model is sent and stored.
        """
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        load_exchanged(network, self._start(lab))
        lab.fit(network, objective=self._distillation_loss(lab, network))
        return send_and_keep(network)

    train = distil  # No model has been overseas in round 1

    def _start(self, lab: Lab) -> dict[str, Tensor]:
        """Return the weights from which the training of the silo's own model starts.

        By default they are the silo's own model. If 'fedefm.continue-from' is "mean", the received
        mean of all silos' models takes its place. If the server also sent neighbours' models, each
        is first trained on this silo's data for 'fedefm.overseas-steps' steps. The start is then
        half the former model plus half the mean of the trained models.

        Raises:
            SiteError: the message or the silo has no model to start from (``_home_model``).
        """
        if visitors := self._train_models(lab, NEIGHBOUR):
            # k visitors share one half, and the home model has the other
            shares = dict.fromkeys(visitors, 0.5 / len(visitors))
            return mix_models(
                {**visitors, lab.site: self._home_model(lab)}, {**shares, lab.site: 0.5}
            )
        return self._home_model(lab)

    def _home_model(self, lab: Lab) -> dict[str, Tensor]:
        """Return the silo's own model, or the received mean if 'fedefm.continue-from' is "mean".

        Without a stored own model, the received model is returned.

        Raises:
            SiteError: with "mean", no mean was received. Otherwise the silo has neither a stored
                model nor a received one.
        """
        if self.settings.continue_from == "own":
            return own_model(lab)
        if theta := lab.arrays(MODEL):
            return theta
        raise SiteError(
            f"'fedefm.continue-from' is 'mean', but site {lab.site} received none: server and "
            "site run different versions of fedsilo"
        )

    def _distillation_loss(self, lab: Lab, network: TokenClassifier) -> Objective | None:
        """Build the loss that teaches this silo's network from the copies that neighbours trained.

        Such a copy is called an expert. The loss (``multishot_loss``) combines the task's loss with
        the distance of the network's predictions from each expert's. An expert counts more if its
        feature maps are close to the network's. Each call of the loss also updates one metric per
        expert: the expert's mean closeness over the batches so far. If no experts were received,
        the result is None.
        """
        returned = by_site(lab.arrays(EXPERT))
        if not returned:
            return None
        experts = {
            host: lab.classifier(arrays).eval().requires_grad_(False)
            for host, arrays in returned.items()
        }
        totals = dict.fromkeys(experts, (0.0, 0))

        def objective(inputs: Tensor, labels: Tensor) -> Tensor:
            loss, weights = multishot_loss(network, experts, inputs, labels, self.settings)
            for host, weight in weights.items():
                total, count = totals[host][0] + weight, totals[host][1] + 1
                totals[host] = (total, count)
                name = measurement(TRAINED, "train", metric_from(CLOSENESS, host))
                lab.metrics[name] = total / count
            return loss

        return objective
