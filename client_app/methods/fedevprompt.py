"""FedEvPrompt at a site: train prompts on evidence and the others' maps, then send own maps.

Prompts and head that are not shared stay in the site's own state: ``network/<array>``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fedsilo.client_app.methods.base import SiteMethod
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import START
from fedsilo.models.contract.seeding import generator
from fedsilo.models.maths.attention_rollout import (
    BufferMoments,
    buffer_moments,
    distillation_loss,
    scaled_maps,
    upsampling_gram,
)
from fedsilo.models.maths.dirichlet import vacuity
from fedsilo.models.methods.fedevprompt import (
    BUFFER,
    MAPS,
    FedEvPromptSettings,
    any_of_class,
    map_fault,
    most_certain,
    shared_names,
)
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.site_network import SiteNetwork

_NETWORK = "network/"


class FedEvPromptSite(SiteMethod):
    """Holds prompts, a head and an optimiser of its own."""

    settings: FedEvPromptSettings

    @classmethod
    def consent(cls, settings: FedEvPromptSettings) -> tuple[str, str] | None:
        """Ask a hospital before attention maps of single images leave it."""
        if not settings.distillation_weight:
            return None
        return (
            "allow-embeddings",
            "the run sends attention maps, each of one training image, to all other sites; "
            "'fedevprompt.distillation-weight' 0 goes without",
        )

    def open_network(self) -> PromptedViT:
        """Build the network from what the run starts from, the site's own state and what came."""
        network = cast(PromptedViT, initial_classifier(self.common, self.silo))
        # A finished run's model is read with the buffer in it
        foreign, start = (MAPS, BUFFER, START), self.request.arrays(START)
        shared = {n: a for n, a in self.request.arrays().items() if not n.startswith(foreign)}
        arrays = exchanged_arrays(network) | start | self.own_state(_NETWORK) | shared
        load_exchanged(network, arrays)
        return self.compute.place(network)

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Train on evidence, with distillation where others have sent maps (eq. 2)."""
        vit = cast(PromptedViT, network)
        training = super().local_training(network)
        moments = self._moments(vit)
        if moments is None:
            return training
        weight, per_site = self.settings.distillation_weight, self.settings.buffer_maps

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            tokens, maps = vit.encode_with_rollout(inputs)
            task = vit.criterion(vit.classify(tokens), labels)
            scaled = scaled_maps(maps, self.settings.map_scale)
            return task + weight * distillation_loss(scaled, labels, moments, per_site)

        return replace(training, objective=loss)

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the maps of the chosen training samples, and what is averaged."""
        vit = cast(PromptedViT, network)
        arrays = exchanged_arrays(vit)
        shared = {name: arrays[name] for name in shared_names(self.settings, list(arrays))}
        return shared | (self._maps(vit) if self.settings.distillation_weight else {})

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return what is not averaged."""
        arrays = exchanged_arrays(network)
        private = arrays.keys() - set(shared_names(self.settings, list(arrays)))
        return {f"{_NETWORK}{name}": arrays[name] for name in sorted(private)}

    def presentable(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make noised maps maps again: not negative, summing to 1; one without a rest is even."""
        return {
            name: as_maps(array) if name.startswith(MAPS) else array
            for name, array in arrays.items()
        }

    def _moments(self, vit: PromptedViT) -> BufferMoments | None:
        """Return the moments of the others' maps, None if there are none.

        Raises:
            SiteError: a map that came cannot be one.
        """
        by_class: dict[int, list[Tensor]] = {}
        for name, maps in self.request.arrays().items():
            if not name.startswith(MAPS):
                continue
            site, _, label = name.removeprefix(MAPS).rpartition("/")
            if fault := self._entry_fault(site, label, maps, vit.map_size()):
                raise SiteError(f"the buffer's entry of site {site}, class {label}: {fault}")
            scaled = scaled_maps(maps, self.settings.map_scale)
            by_class.setdefault(int(label), []).append(scaled)
        if not by_class:
            return None
        gram = upsampling_gram(vit.grid_size(), vit.image_size())
        joined = {label: torch.cat(parts) for label, parts in sorted(by_class.items())}
        return buffer_moments(joined, self.silo.task.classes, gram).to(self.compute.device)

    def _entry_fault(self, site: str, label: str, maps: Tensor, cells: int) -> str | None:
        """Return why the buffer's entry of a site and class cannot be one, None if it can."""
        if site == self.silo.name:
            return "these are its own maps, which must not come back"
        if not label.isdecimal() or int(label) >= self.silo.task.classes:
            return "there is no such class"
        if maps.ndim != 2 or maps.shape[1] != cells:
            return f"it is {tuple(maps.shape)}, not (any, {cells})"
        return map_fault(maps)

    def _maps(self, vit: PromptedViT) -> dict[str, Tensor]:
        """Return the maps (up to M, cells) of each class that this site has samples of."""
        train, count = self.silo.train, self.settings.buffer_maps
        by_vacuity = self.settings.buffer_selection == "uncertainty"
        vacuities = self._vacuities(vit) if by_vacuity else torch.empty(0)
        maps = {}
        for label in torch.unique(train.labels).tolist():
            if by_vacuity:
                chosen = most_certain(vacuities, train.labels, label, count)
            else:
                key = (self.request.instruction.round, self.silo.name, label)
                rng = generator(self.drawing.seed, "buffer", *key)
                chosen = any_of_class(train.labels, label, count, rng)
            parts = over_batches(
                vit, train.inputs[chosen], self.compute, lambda x: vit.encode_with_rollout(x)[1]
            )
            maps[f"{MAPS}{label}"] = parts
        return maps

    def _vacuities(self, vit: PromptedViT) -> Tensor:
        """Return the vacuity (n,) of every training sample."""
        return over_batches(
            vit,
            self.silo.train.inputs,
            self.compute,
            lambda x: vacuity(vit.classify(vit.encode(x)).exp()),
        )


def as_maps(noised: Tensor) -> Tensor:
    """Return rows (n, cells) clamped at 0 and divided by their sums; a row of zeros is even."""
    kept = noised.clamp(min=0)
    kept = torch.where(kept.sum(dim=-1, keepdim=True) > 0, kept, torch.ones_like(kept))
    return kept / kept.sum(dim=-1, keepdim=True)
