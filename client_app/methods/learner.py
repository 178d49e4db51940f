"""How a site opens its network and trains it, and what of that a method may change."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from client_app.site.private_state import SiteState
from client_app.site.request import Request
from client_app.training.compute import choose_compute
from client_app.training.loop import (
    Objective,
    Penalty,
    open_optimiser,
    passes_of,
    steps_of,
    train_locally,
)
from client_app.training.pacing import PREFIX, open_pacing, restore_optimiser
from datasets.silo.silos import Silo, Split
from datasets.weights.backbones import load_backbone
from models.contract.array_names import arrays_below
from models.contract.errors import SiteError
from models.contract.seeding import generator
from models.contract.settings import CommonSettings, NoSettings
from models.maths.dirichlet import annealing, evidences, skewed_prior
from models.maths.pacing import epoch_of
from models.networks.build import build_classifier
from models.networks.classifier import TokenClassifier
from models.networks.exchanged import load_exchanged
from models.networks.site_network import SiteNetwork


class Learner(ABC):
    """What a method at a site trains, for one message.

    Class attributes:
        settings_class: the method's own settings.
    """

    settings_class: ClassVar[type] = NoSettings

    def __init__(
        self, request: Request, silo: Silo, common: CommonSettings, settings: Any, state: SiteState
    ) -> None:
        self.request = request
        self.silo = silo
        self.common = common
        self.settings = settings
        self.state = state
        self.compute = choose_compute(common.device, common.precision, common.threads)
        self.started = time.perf_counter()
        self.kept_state = False
        self.told: dict[str, float] = {}  # what else a method measures while it trains
        self._paced: dict[str, Tensor] = {}  # pacing's part of the site's new state

    @abstractmethod
    def open_network(self) -> SiteNetwork:
        """Build the network from the message and the site's state."""

    def classifier(self, arrays: dict[str, Tensor] | None) -> TokenClassifier:
        """Return the network with ``arrays``, else with the seed's initial weights, placed."""
        network = self.new_classifier()
        if arrays is not None:
            load_exchanged(network, arrays)
        return cast(TokenClassifier, self.compute.place(network))

    def new_classifier(self) -> TokenClassifier:
        """Return the network with the seed's initial weights, the backbone's and the site's prior.

        Raises:
            SettingError: the backbone's weights are missing or of another architecture.
        """
        network = build_classifier(self.common, self.silo.task)
        load_backbone(network, self.common)
        set_prior(network, self.silo.train.labels)
        return network

    @cached_property
    def stored(self) -> dict[str, Tensor]:
        """The site's own state before this message, read and checked once; empty if none."""
        return self.state.before(self.request.instruction) or {}

    def own_state(self) -> dict[str, Tensor] | None:
        """Return the method's own part of it, without pacing's; None if there is none."""
        own = {name: array for name, array in self.stored.items() if not name.startswith(PREFIX)}
        return own or None

    def stored_under(self, prefix: str) -> dict[str, Tensor]:
        """Return the arrays of the site's own state whose names begin so, without the prefix."""
        return arrays_below(prefix, self.stored)

    def own_arrays(self) -> dict[str, Tensor]:
        """Return the site's own arrays of an earlier round.

        Raises:
            SiteError: it has none.
        """
        own = self.own_state()
        if own is None:
            raise SiteError(
                f"site {self.silo.name} has no model of its own yet, and none came: it missed the "
                "round in which it was to train one; resume from before it, or leave the site out"
            )
        return own

    def fit(self, network: SiteNetwork) -> float:
        """Train ``network`` and return its mean loss over the last epoch, or over a paced round."""
        if self.common.epoch_steps:
            return self._fit_paced(network)
        return self._train(network, self.optimiser(network), None)

    def _fit_paced(self, network: SiteNetwork) -> float:
        module = cast(nn.Module, network)
        pacing = open_pacing(
            self.stored,
            self.request.instruction.round,
            len(self.training_data()),
            self.common,
            lambda epoch: self.epoch_order(network, epoch),
        )
        optimiser = open_optimiser(module, self.training_settings())
        restore_optimiser(optimiser, module, self.stored)
        loss = self._train(network, optimiser, [pacing.batches()])
        self._paced = pacing.stored(optimiser, module)
        return loss

    def _train(
        self, network: SiteNetwork, optimiser: Optimizer | None, plan: list[list[Tensor]] | None
    ) -> float:
        return train_locally(
            network,
            self.training_data(),
            self.training_settings(),
            self.compute,
            (self.request.instruction.round, self.silo.name),
            self.penalty(network),
            objective=self.objective(network),
            optimiser=optimiser,
            pass_begins=lambda number: self.pass_begins(network, number),
            plan=plan,
            steps_before=self._steps_before(),
            after_step=self.after_step(network, optimiser),
        )

    def _steps_before(self) -> int:
        """Return the optimiser steps of the rounds before this one."""
        earlier = self.request.instruction.round - 1
        if self.common.rate_decay == "none":
            return 0  # nobody asks
        if self.common.epoch_steps:
            return earlier * self.common.pace
        return earlier * steps_of(len(self.training_data()), self.training_settings())

    def epoch_order(self, network: SiteNetwork, epoch: int) -> Tensor:
        """Return the order (n,) of an epoch's training samples: any, each sample once.

        It is asked for before an epoch that spans rounds, ``network`` being as it came.
        """
        draw = generator(self.common.seed, "epoch-order", epoch, self.silo.name)
        return torch.randperm(len(self.training_data()), generator=draw)

    def after_step(
        self, network: SiteNetwork, optimiser: Optimizer | None
    ) -> Callable[[Tensor], None] | None:
        """Return what is done with a batch's inputs after a step of ``optimiser``; None: nothing.

        None stands for an optimiser that is opened afresh.
        """
        return None

    def training_settings(self) -> CommonSettings:
        """Return the settings of local training."""
        return self.common

    def training_data(self) -> Split:
        """Return what the site trains on."""
        return self.silo.train

    def penalty(self, network: SiteNetwork) -> Penalty | None:
        """Return what is added to each batch's loss; None: nothing."""
        return None

    def objective(self, network: SiteNetwork) -> Objective:
        """Return the loss of a batch, as a function of inputs and labels."""
        return network.loss

    def optimiser(self, network: SiteNetwork) -> Optimizer | None:
        """Return an optimiser to go on with; None: a fresh one each round."""
        return None

    def pass_begins(self, network: SiteNetwork, number: int) -> None:
        """Weigh the KL term of evidential learning by the epochs of all rounds so far."""
        round_ = self.request.instruction.round
        if self.common.epoch_steps:
            before = epoch_of(round_, self.common)
        else:
            before = (round_ - 1) * passes_of(len(self.training_data()), self.training_settings())
        for evidence in evidences(cast(nn.Module, network)):
            evidence.kl_weight = annealing(before + number)


def set_prior(network: nn.Module, labels: Tensor) -> None:
    """Give an evidential network the prior of ``labels`` (n,), what it is trained on."""
    for evidence in evidences(network):
        counts = torch.bincount(labels, minlength=len(evidence.prior))
        evidence.prior.copy_(skewed_prior(counts))
