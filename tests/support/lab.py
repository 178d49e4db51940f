"""What a method makes of a message, seen from within: what it trains with, sends and keeps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest import mock

from flwr.app import Context, Message
from torch import Tensor

from fedsilo.client_app.answer import answer, evaluate
from fedsilo.client_app.lab import Lab, Outgoing
from fedsilo.client_app.session import SiteSession, finished_session, session_of
from fedsilo.core.messages import CONFIG, Instruction
from fedsilo.core.methods import settings_class
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.networks.site_network import SiteNetwork

__all__ = ["Steps", "answer", "evaluate", "fitted", "lab_of", "session_with", "steps_of"]


@dataclass
class Steps:
    """What a method gave to the steps of its phase.

    Attributes:
        network: what was opened.
        fit: the arguments of ``Lab.fit``.
        outgoing: what the phase returned.
    """

    network: SiteNetwork
    fit: dict[str, Any] = field(default_factory=dict)
    outgoing: Outgoing = field(default_factory=Outgoing)

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of a batch: the method's, else the network's own."""
        chosen = self.fit.get("objective") or self.network.loss
        return cast("Callable[[Tensor, Tensor], Tensor]", chosen)

    @property
    def sent(self) -> Mapping[str, Tensor]:
        """The arrays that would leave, before clipping and noise."""
        return cast("Mapping[str, Tensor]", self.outgoing.send)

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """The arrays that the site would keep."""
        return self.outgoing.keep or {}


def steps_of(lab: Lab, network: Any = None, train: bool = False) -> Steps:
    """Run the method's phase on ``network``, or what it opens, without training and reply.

    ``train``: train all the same.
    """
    opened: SiteNetwork = lab.open() if network is None else network
    steps, fit = Steps(opened), lab.fit

    def caught_fit(trained: SiteNetwork, **options: Any) -> None:
        if trained is opened and not options.get("aside"):
            steps.fit = options
        if train:
            fit(trained, **options)

    replaced = {
        "open": lambda: opened,
        "measure": lambda _: None,
        "fit": caught_fit,
    }
    with mock.patch.multiple(lab, **replaced):
        steps.outgoing = lab.session.phase_function(lab.instruction.phase)(lab)
    return steps


def fitted(lab: Lab, network: Any) -> Steps:
    """Train ``network`` as the method's phase does, and measure and send nothing."""
    return steps_of(lab, network, train=True)


def lab_of(message: Message, context: Context) -> Lab:
    """Open a message at a node, as the app does."""
    instruction = Instruction.from_config(message.content[CONFIG])
    return Lab(session_of(context), message.content, instruction)


def session_with(settings: CommonSettings, silo: Silo) -> SiteSession:
    """Return the session of a real site that has no limits and no node config."""
    own = settings_class(settings.method)()
    return replace(finished_session(settings, own, silo), simulated=False)
