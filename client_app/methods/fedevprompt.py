"""FedEvPrompt at a site: train prompts on evidence and the others' maps, then send its own maps.

Prompts and head that are not shared are stored in the site's own state: ``network/<array>``.
"""

from typing import cast

import torch
from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.client_app.training.loop import Objective
from fedsilo.core.array_names import with_prefix
from fedsilo.core.errors import SiteError
from fedsilo.core.messages import START
from fedsilo.core.seeding import generator
from fedsilo.models.maths.attention_rollout import (
    BufferMoments,
    buffer_moments,
    distillation_loss,
    scaled_maps,
    upsampling_gram,
)
from fedsilo.models.maths.dirichlet import vacuity
from fedsilo.models.methods.fedevprompt import (
    MAPS,
    FedEvPromptSettings,
    any_of_class,
    map_fault,
    most_certain,
    shared_names,
)
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged

_NETWORK = "network/"


class FedEvPromptSite(SiteMethod):
    """Trains prompts and a head on a frozen ViT; sends attention maps and the shared arrays."""

    settings: FedEvPromptSettings

    def admit(self, session: SiteSession) -> None:
        """Require a real hospital's consent if attention maps of single images would leave it.

        No consent is needed if 'fedevprompt.distillation-weight' is 0, or at a simulated site.

        Raises:
            RefusedError: consent is needed, but the node config does not set
                'allow-embeddings=true'.
        """
        if self.settings.distillation_weight:
            session.require_consent(
                "allow-embeddings",
                "the run sends attention maps, each of one training image, to all other sites; "
                "'fedevprompt.distillation-weight' 0 goes without",
            )

    def open(self, lab: Lab) -> PromptedViT:
        """Build the prompted ViT on the compute device, with the values of its arrays known so far.

        Each array comes from the first of these sources that has it:

        - the shared arrays that the server sent,
        - the arrays that the site has stored,
        - the run's initial arrays in the message.

        Any other array is drawn from the seed. Received arrays with a '/' in their names, such as
        attention maps, do not belong to the network.

        Raises:
            SettingError: the arrays do not fit the network, or the backbone's weights are missing.
        """
        network = cast(PromptedViT, initial_classifier(lab.common, lab.silo, lab.task))
        # Maps do not belong to the network, nor does the buffer in a finished run's model
        shared = {n: a for n, a in lab.arrays().items() if "/" not in n}
        arrays = exchanged_arrays(network) | lab.arrays(START) | lab.state(_NETWORK) | shared
        load_exchanged(network, arrays)
        return lab.compute.place(network)

    def train(self, lab: Lab) -> Outgoing:
        """Train prompts and head, and send the shared arrays and this site's attention maps.

        The ViT itself is frozen. The received network is measured first, if the server asks for
        metrics. The loss is the network's evidential loss, plus the distance from other sites' maps
        if any were received (``_distillation_loss``). 'fedevprompt.shared-prompts' decides which of
        the trained arrays are sent. The rest are stored at the site. If
        'fedevprompt.distillation-weight' is 0, no maps are made or sent.

        Raises:
            SiteError: a received map is invalid, or the training diverged.
            RefusedError: the hospital's limits forbid the training.
        """
        network = cast(PromptedViT, lab.open())
        lab.measure(network)
        lab.fit(network, objective=self._distillation_loss(lab, network))
        arrays = exchanged_arrays(network)
        shared = shared_names(self.settings, list(arrays))
        private = {n: array for n, array in arrays.items() if n not in shared}
        send = {name: arrays[name] for name in shared}
        if self.settings.distillation_weight:
            send |= self._maps(lab, network)
        return Outgoing(network, send=send, keep=with_prefix(_NETWORK, private))

    def _distillation_loss(self, lab: Lab, vit: PromptedViT) -> Objective | None:
        """Build the loss: the network's own loss plus a distance from other sites' maps (eq. 2).

        The own loss is evidential. The distance compares the attention maps of a batch's images
        with the received maps of the same class (``_moments``). It is multiplied by
        'fedevprompt.distillation-weight'. If no maps were received, the result is None, and the
        network's own loss is used alone.

        Raises:
            SiteError: a received array of maps is invalid.
        """
        moments = self._moments(lab, vit)
        if moments is None:
            return None
        weight, per_site = self.settings.distillation_weight, self.settings.buffer_maps

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            tokens, maps = vit.encode_with_rollout(inputs, self._renormalises)
            task = vit.criterion(vit.classify(tokens), labels)
            scaled = scaled_maps(maps, self.settings.map_scale)
            return task + weight * distillation_loss(scaled, labels, moments, per_site)

        return loss

    def _moments(self, lab: Lab, vit: PromptedViT) -> BufferMoments | None:
        """Compute the number, mean and spread of the received attention maps of each class.

        The spread is the mean squared distance of an upsampled map from the mean. The distillation
        loss compares the maps of a batch with these moments. Each received array has the maps of
        one other site and one class. All sites' maps of a class are put together, after scaling by
        'fedevprompt.map-scale'.

        Returns:
            The moments of each class, on the compute device. All are 0 for a class without maps.
            None if no maps were received.

        Raises:
            SiteError: a received array was made by this site, belongs to an unknown class, has
                another shape, or has invalid maps.
        """
        by_class: dict[int, list[Tensor]] = {}
        for name, maps in lab.arrays(MAPS).items():
            site, _, label = name.rpartition("/")
            fault = _entry_fault(lab, site, label, maps, vit.map_size())
            if fault:
                raise SiteError(f"the buffer's entry for site {site}, class {label}: {fault}")
            scaled = scaled_maps(maps, self.settings.map_scale)
            by_class.setdefault(int(label), []).append(scaled)
        if not by_class:
            return None
        gram = upsampling_gram(vit.grid_size(), vit.image_size())
        joined = {label: torch.cat(parts) for label, parts in sorted(by_class.items())}
        return buffer_moments(joined, lab.silo.shape.outputs, gram).to(lab.compute.device)

    def _maps(self, lab: Lab, vit: PromptedViT) -> dict[str, Tensor]:
        """Return attention maps of this site's training samples, named ``maps/<class>``.

        Each array (m, cells) has one map for each of m samples of the class, at most
        'fedevprompt.buffer-maps'. If 'fedevprompt.buffer-selection' is "uncertainty", the chosen
        samples are those with the lowest vacuity, for which the network has the most evidence.
        Otherwise they are drawn at random in each round. A class without samples has no array.
        """
        train, count = lab.silo.train, self.settings.buffer_maps

        def rollout(images: Tensor) -> Tensor:
            return vit.encode_with_rollout(images, self._renormalises)[1]

        by_vacuity = self.settings.buffer_selection == "uncertainty"
        vacuities = torch.empty(0)
        if by_vacuity:
            vacuities = _vacuities(lab, vit)
        maps = {}
        for label in torch.unique(train.labels).tolist():
            if by_vacuity:
                chosen = most_certain(vacuities, train.labels, label, count)
            else:
                key = (lab.instruction.round, lab.site, label)
                rng = generator(lab.sampling.seed, "buffer", *key)
                chosen = any_of_class(train.labels, label, count, rng)
            maps[f"{MAPS}{label}"] = over_batches(vit, train.inputs[chosen], lab.compute, rollout)
        return maps

    @property
    def _renormalises(self) -> bool:
        return self.settings.map_prompts == "renormalise"


def _entry_fault(lab: Lab, site: str, label: str, maps: Tensor, cells: int) -> str | None:
    """Return the reason why received attention maps are invalid, as text; None if they are valid.

    Args:
        lab: the lab of the message.
        site: the site that made the maps; it must not be this site.
        label: the class of the maps, as the text of its number, such as "3". The task must have it.
        maps: the maps, one per row, of shape (n, cells). Their values must be finite and not
            negative, and each map's values must sum to 1 (``map_fault``).
        cells: the number of cells of a map.
    """
    if site == lab.site:
        return "these are its own maps, which must not come back"
    if not label.isdecimal() or int(label) >= lab.silo.shape.outputs:
        return "there is no such class"
    if maps.ndim != 2 or maps.shape[1] != cells:
        return f"it is {tuple(maps.shape)}, not (any, {cells})"
    return map_fault(maps)


def _vacuities(lab: Lab, vit: PromptedViT) -> Tensor:
    """Return the vacuity of every training sample, (n,) float32; high means little evidence."""
    return over_batches(vit, lab.silo.train.inputs, lab.compute, lambda x: vacuity(vit(x).exp()))
