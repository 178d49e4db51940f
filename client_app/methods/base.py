"""What a method says at a site; ``client_app/site_round.py`` does the rest, the same for all.

A method says how its network is built from what came, how it is trained, what of it stays at the
site and what leaves. When that is asked for, what is measured and how an answer leaves the site is
the round's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from fedsilo.client_app.site.limits import NO_LIMITS, Limits
from fedsilo.client_app.site.private_state import SiteState
from fedsilo.client_app.site.request import Request
from fedsilo.client_app.training.certainty import EvidenceProbe, vacuity_of
from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import Probe
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.client_app.training.loop import LocalTraining, passes_of, steps_of
from fedsilo.client_app.training.pacing import PREFIX
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.contract.errors import DataError, SettingError, SiteError
from fedsilo.models.contract.messages import EVALUATE
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.dirichlet import annealing, evidences
from fedsilo.models.maths.pacing import epoch_of
from fedsilo.models.networks.classifier import TokenClassifier
from fedsilo.models.networks.exchanged import load_exchanged
from fedsilo.models.networks.site_network import SiteNetwork

if TYPE_CHECKING:
    from fedsilo.client_app.explain.explanation import Explanation
    from fedsilo.models.networks.prompted_vit import PromptedViT


@dataclass(frozen=True)
class SiteContext:
    """What a site has at hand while it answers one message.

    Attributes:
        request: the message.
        silo: the site's data, a table's features standardised.
        common: the run's settings, with the site's own folders and limits over them.
        settings: the method's own.
        state: what the site keeps for itself in this run.
        compute: device and precision.
        limits: the hospital's floors; none in a simulation.
        seed: what the site draws from; None: the run's.
        shares: what training tells of how much samples added to each unit's change.
    """

    request: Request
    silo: Silo
    common: CommonSettings
    settings: Any
    state: SiteState
    compute: Compute
    limits: Limits = NO_LIMITS
    seed: int | None = None
    shares: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def drawing(self) -> CommonSettings:
        """The settings by which samples are ordered, chosen and left out: with the site's own seed.

        What all sites must have alike, such as initial weights, is of ``common``.
        """
        return self.common if self.seed is None else replace(self.common, seed=self.seed)

    @cached_property
    def stored(self) -> dict[str, Tensor]:
        """The site's own state before this message, read and checked once; empty if none."""
        return self.state.before(self.request.instruction) or {}

    def has_read_state(self) -> bool:
        """Tell whether the method has asked for the site's own state: its model is the site's."""
        return "stored" in vars(self)


@dataclass(frozen=True)
class Answer:
    """What a phase in which nothing is trained here gives.

    Attributes:
        metrics: by MetricRecord key.
        arrays: leave the site, by name, as those of ``SiteMethod.outgoing`` do.
        kept: the site's own state from now on; empty: as it was.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredModel:
    """A network that is measured, and what its measurements are called.

    Attributes:
        network: placed on the compute device.
        names: metric -> the name that it is told by, others are not told; None: all by their own.
    """

    network: SiteNetwork
    names: Mapping[str, str] | None = None


class SiteMethod(ABC):
    """One method at one site, for one message: hooks that are asked for in the order below.

    A phase of its own is a method ``phase_<name>()`` that returns an ``Answer``.

    Attributes:
        context: all that is at hand; ``request``, ``silo``, ``common``, ``drawing``, ``settings``
            and ``compute`` are of it.
    """

    def __init__(self, context: SiteContext) -> None:
        self.context = context
        self.request = context.request
        self.silo = context.silo
        self.common = context.common
        self.drawing = context.drawing
        self.settings = context.settings
        self.compute = context.compute

    @classmethod  # noqa: B027  # most methods take every site
    def admit(cls, silo: Silo, common: CommonSettings, settings: Any) -> None:
        """Refuse to take part at all, by a ``SiteError``: asked before anything leaves the site."""

    @classmethod
    def consent(cls, settings: Any) -> tuple[str, str] | None:
        """Return what a real hospital must agree to: a key of its node config, and why."""
        return None

    @abstractmethod
    def open_network(self) -> SiteNetwork:
        """Build the network from the message and the site's state."""

    def measured(self, network: SiteNetwork) -> Iterator[MeasuredModel]:
        """Yield what is measured where ``network`` is to be: ``network``.

        One model is measured before the next is asked for.
        """
        yield MeasuredModel(network)

    def probe(self, network: SiteNetwork, split: str) -> Probe | None:
        """Return what the method itself measures on ``split``; None: nothing.

        An evidential network is asked for its vacuity, and at the end, of enough test samples, for
        how its accuracy goes with its certainty.
        """
        if not evidences(network):
            return None
        labels = self.silo.splits()[split].labels
        final = self.request.instruction.phase == EVALUATE and split == "test"
        enough = len(labels) >= self.common.sums_min_count
        return EvidenceProbe(network, labels, final and enough)

    def sample_figures(self, network: SiteNetwork, tokens: Tensor) -> dict[str, Tensor]:
        """Return what ``network`` says of each sample beside its class probabilities.

        Args:
            network: what is measured.
            tokens: (batch, l, c), as ``network`` encodes them.

        Returns:
            (batch,) on the CPU by name; of an evidential network its ``vacuity``. Nothing is drawn.
        """
        return {"vacuity": vacuity_of(network, tokens)} if evidences(network) else {}

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Return how ``network``, which is as it was measured, is trained now.

        A method of its own puts ``dataclasses.replace`` around this one's.
        """
        return plain_training(self.context, network, self.silo.train, self.context.drawing)

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the arrays that the site keeps for itself after training; may be empty."""
        return {}

    @abstractmethod
    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the arrays that leave the site after training; may be empty."""

    def clip_reference(self) -> dict[str, Tensor]:
        """Return what clipping measures the outgoing arrays from, by name: all that came."""
        return self.request.arrays()

    def presentable(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return noised arrays in the form that the server checks; it may see nothing but them."""
        return arrays

    def explain(self, split: str, row: int) -> Explanation:
        """Say why the model that came answers as it does for one sample of this silo.

        An image's is by where a prompted ViT looked, or by a convolutional network's Grad-CAM.

        Raises:
            SettingError: the method explains nothing.
            DataError: the split has no such row.
        """
        if self.silo.features:
            raise SettingError(f"method '{self.common.method}' does not explain its answers")
        chosen = self.silo.splits()[split]
        refuse_row(self.silo, split, row)
        names = self.silo.class_names()
        title = f"{self.silo.name}, {split} row {row}: truth {names[int(chosen.labels[row])]}"
        network = self.open_network()
        if self.common.network != "vit":
            from fedsilo.client_app.explain.gradcam import explain_by_grad_cam

            return explain_by_grad_cam(network, chosen, self.compute, row, title, names)
        from fedsilo.client_app.explain.attention import explain_by_attention

        vit = cast("PromptedViT", network)
        return explain_by_attention(vit, chosen, self.compute, row, title, names)

    def classifier(self, arrays: dict[str, Tensor] | None) -> TokenClassifier:
        """Return the network with ``arrays``, else with the seed's initial weights, placed."""
        network = initial_classifier(self.common, self.silo)
        if arrays is not None:
            load_exchanged(network, arrays)
        return self.compute.place(network)

    def own_state(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the site's arrays of an earlier phase whose names begin so, without the prefix.

        Where epochs span rounds, the arrays of their progress are none of the method's.
        """
        return {
            name.removeprefix(prefix): array
            for name, array in self.context.stored.items()
            if name.startswith(prefix) and not name.startswith(PREFIX)
        }

    def own_arrays(self) -> dict[str, Tensor]:
        """Return the site's own arrays of an earlier round.

        Raises:
            SiteError: it has none.
        """
        own = self.own_state()
        if not own:
            raise SiteError(
                f"site {self.silo.name} has no model of its own yet, and none came: it missed the "
                "round in which it was to train one; resume from before it, or leave the site out"
            )
        return own


def plain_training(
    context: SiteContext, network: SiteNetwork, split: Split, settings: CommonSettings
) -> LocalTraining:
    """Return the training of ``network`` on ``split`` that every method starts from.

    It weighs the KL term of evidential learning by the epochs of all rounds so far, and counts the
    steps of the rounds before this one, where each was as long as this one is.
    """
    round_, floor = context.request.instruction.round, context.limits.minimum_batch

    def pass_begins(number: int) -> None:
        if settings.epoch_steps:
            before = epoch_of(round_, settings)
        else:
            before = (round_ - 1) * passes_of(len(split), settings, floor)
        for evidence in evidences(network):
            evidence.kl_weight = annealing(before + number)

    return LocalTraining(
        network,
        split,
        settings,
        context.compute,
        (round_, context.silo.name),
        pass_begins=pass_begins,
        steps_before=_steps_before(round_ - 1, len(split), settings, floor),
        minimum_batch=floor,
        minimum_steps=context.limits.minimum_steps_per_reply,
        shares=context.shares,
    )


def _steps_before(rounds: int, samples: int, settings: CommonSettings, floor: int) -> int:
    if settings.rate_decay == "none":
        return 0  # nobody asks
    return rounds * (settings.pace if settings.epoch_steps else steps_of(samples, settings, floor))


def refuse_row(silo: Silo, split: str, row: int) -> None:
    """Refuse a row that ``split`` does not have.

    Raises:
        DataError: says how many it has.
    """
    count = len(silo.splits()[split])
    if not 0 <= row < count:
        raise DataError(
            f"site {silo.name} has {count} {split} rows, counted from 0: there is no row {row}"
        )
