"""FedEFM at a silo: train the neighbours' models on one's own data, then distil from one's own.

Private state as every decentralised method's: ``own/<array>``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor

from fedsilo.client_app.methods.base import Answer, plain_training
from fedsilo.client_app.methods.decentralised import DecentralisedSite
from fedsilo.client_app.training.loop import LocalTraining, steps_of, train_locally
from fedsilo.models.contract.array_names import by_site
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import TRAINED, measurement
from fedsilo.models.methods.cross import metric_from
from fedsilo.models.methods.decentralised import mixed
from fedsilo.models.methods.fedefm import (
    CLOSENESS,
    EXPERT,
    OVERSEAS,
    VISITOR,
    FedEFMSettings,
    multishot_loss,
)
from fedsilo.models.networks.classifier import TokenClassifier
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.site_network import SiteNetwork


class FedEFMSite(DecentralisedSite):
    """Hosts its neighbours' models, and learns from its own as they come back."""

    settings: FedEFMSettings

    def phase_overseas(self) -> Answer:
        """Train each visitor on this silo's data (eq. 1) and send it back."""
        returned: dict[str, Tensor] = {}
        for owner, arrays in by_site(self.request.arrays(VISITOR)).items():
            visitor = self.classifier(arrays)
            train_locally(self._visitor_training(visitor, owner))
            trained = exchanged_arrays(visitor)
            returned |= {f"{VISITOR}{owner}/{name}": array for name, array in trained.items()}
        return Answer(arrays=returned)

    def start(self) -> dict[str, Tensor]:
        """Return the student: the silo's own model, or the mean of what came back."""
        returned = by_site(self.request.arrays(EXPERT))
        if returned and self.settings.student == "experts":
            return mixed(returned, dict.fromkeys(returned, 1.0))
        return self._home_model()

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Distil from the experts that came back; without any, train plainly."""
        training = super().local_training(network)
        returned = by_site(self.request.arrays(EXPERT))
        if not returned:
            return training
        if self.settings.student == "experts":
            returned = {self.silo.name: self._home_model()}
        experts = {host: self._expert(arrays) for host, arrays in returned.items()}
        totals = dict.fromkeys(experts, (0.0, 0))

        def objective(inputs: Tensor, labels: Tensor) -> Tensor:
            loss, weights = multishot_loss(
                cast(TokenClassifier, network), experts, inputs, labels, self.settings
            )
            for host, weight in weights.items():
                total, count = totals[host][0] + weight, totals[host][1] + 1
                totals[host] = (total, count)
                name = measurement(TRAINED, "train", metric_from(CLOSENESS, host))
                training.metrics[name] = total / count
            return loss

        return replace(training, objective=objective)

    def clip_reference(self) -> dict[str, Tensor]:
        """Return what the server knows without this silo: visitors as they came, or Theta."""
        if self.request.instruction.phase == OVERSEAS:
            return self.request.arrays()
        return super().clip_reference()

    def _home_model(self) -> dict[str, Tensor]:
        """Return what the silo goes on from.

        Raises:
            SiteError: that is Theta, and it did not come.
        """
        if self.settings.continue_from == "own":
            return self.own_model()
        if theta := self.theta():
            return theta
        raise SiteError(
            f"'fedefm.continue-from' is 'mean' and no mean came to site {self.silo.name}: server "
            "and "
            "site run different versions of fedsilo"
        )

    def _expert(self, arrays: dict[str, Tensor]) -> TokenClassifier:
        return self.classifier(arrays).eval().requires_grad_(False)

    def _visitor_training(self, visitor: TokenClassifier, owner: str) -> LocalTraining:
        """Return a visitor's training, in which rates and evidence stand where they do at home."""
        steps, round_ = self.settings.overseas_steps, self.request.instruction.round
        home = plain_training(self.context, visitor, self.silo.train, self.drawing)
        return replace(
            home,
            settings=replace(self.drawing, local_steps=steps) if steps else self.drawing,
            key=(round_, self.silo.name, OVERSEAS, owner),
            steps_before=(round_ - 1)
            * steps_of(len(self.silo.train), self.common, self.context.limits.minimum_batch),
        )
