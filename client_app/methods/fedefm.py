"""FedEFM at a silo: train the neighbours' models on one's own data, then distil from one's own.

Private state as every decentralised method's: ``own/<array>``.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from flwr.app import RecordDict
from torch import Tensor, nn

from client_app.methods.decentralised import DecentralisedSite
from client_app.training.loop import Objective, steps_of, train_locally
from models.contract.array_names import by_site
from models.contract.errors import SiteError
from models.contract.messages import TRAINED, measurement
from models.methods.cross import metric_from
from models.methods.decentralised import mixed
from models.methods.fedefm import (
    CLOSENESS,
    EXPERT,
    OVERSEAS,
    VISITOR,
    FedEFMSettings,
    multishot_loss,
)
from models.networks.classifier import TokenClassifier
from models.networks.exchanged import exchanged_arrays
from models.networks.site_network import SiteNetwork


class FedEFMSite(DecentralisedSite):
    """Hosts its neighbours' models, and learns from its own as they come back."""

    settings_class = FedEFMSettings
    settings: FedEFMSettings

    def phase_overseas(self) -> RecordDict:
        """Train each visitor on this silo's data (eq. 1) and send it back."""
        found: dict[str, Tensor] = {}
        for owner, arrays in by_site(self.came_below(VISITOR)).items():
            visitor = self.classifier(arrays)
            self._train_visitor(visitor, owner)
            trained = exchanged_arrays(cast(nn.Module, visitor))
            found |= {f"{VISITOR}{owner}/{name}": array for name, array in trained.items()}
        return self.reply({}, found)

    def start(self) -> dict[str, Tensor]:
        """Return the student: the silo's own model, or the mean of what came back."""
        came = by_site(self.came_below(EXPERT))
        if came and self.settings.student == "experts":
            return mixed(came, dict.fromkeys(came, 1.0))
        return self._home_model()

    def objective(self, network: SiteNetwork) -> Objective:
        """Return the distillation from the experts that came back; without any, plain training."""
        came = by_site(self.came_below(EXPERT))
        if not came:
            return super().objective(network)
        if self.settings.student == "experts":
            came = {self.silo.name: self._home_model()}
        experts = {host: self._expert(arrays) for host, arrays in came.items()}
        seen = dict.fromkeys(experts, (0.0, 0))

        def objective(inputs: Tensor, labels: Tensor) -> Tensor:
            loss, weights = multishot_loss(
                cast(TokenClassifier, network), experts, inputs, labels, self.settings
            )
            for host, weight in weights.items():
                total, count = seen[host][0] + weight, seen[host][1] + 1
                seen[host] = (total, count)
                self.told[measurement(TRAINED, "train", metric_from(CLOSENESS, host))] = (
                    total / count
                )
            return loss

        return objective

    def dp_reference(self) -> dict[str, Tensor]:
        """Return what the server knows without this silo: visitors as they came, or Theta."""
        if self.request.instruction.phase == OVERSEAS:
            return self.request.arrays()
        return super().dp_reference()

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
            f"'continue-from' is 'mean' and no mean came to site {self.silo.name}: server and "
            "site run different versions of fedsilo"
        )

    def _expert(self, arrays: dict[str, Tensor]) -> TokenClassifier:
        return self.classifier(arrays).eval().requires_grad_(False)

    def _train_visitor(self, visitor: TokenClassifier, owner: str) -> float:
        steps = self.settings.overseas_steps
        settings = dataclasses.replace(self.common, local_steps=steps) if steps else self.common
        round_ = self.request.instruction.round
        home = steps_of(len(self.training_data()), self.common)
        return train_locally(
            visitor,
            self.training_data(),
            settings,
            self.compute,
            (round_, self.silo.name, OVERSEAS, owner),
            steps_before=(round_ - 1) * home,
            pass_begins=lambda number: self.pass_begins(visitor, number),
        )
