"""What tests of methods share: types of the fixtures, arrays of messages, and sites that fail."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

from flwr.app import Message, RecordDict
from torch import Tensor, nn

from fedsilo.client_app.lab import Lab
from fedsilo.core.messages import ARRAYS
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply

# The fixtures of these names, as functions of what they are called with
Tiny = Callable[..., dict[str, Any]]
Opened = Callable[..., Lab]
InlineRun = Callable[..., RunDirectory]
SharedRun = Callable[..., tuple[Any, Any, Any]]  # the grid, the loop, and a recorder of its rounds
SiteReply = Callable[..., Reply]
Behaviour = Callable[[Message], RecordDict]

# The three simulated sites of the digits, and those of a state that all have taken part in
SITES = ("s1a", "s2a", "s3a")
ALL = list(SITES)


def arrays_of(content: RecordDict) -> dict[str, Any]:
    """Return the arrays of a message's or a reply's content by name; none if it has no arrays."""
    return {name: array.numpy() for name, array in content.array_records.get(ARRAYS, {}).items()}


def network_of(site: Lab) -> TokenClassifier:
    return cast(TokenClassifier, site.open())


def weights_of(site: Lab) -> dict[str, Tensor]:
    """Return the weights that a site's network opens with, by name."""
    return exchanged_arrays(cast(nn.Module, site.open()))


def fail_in_rounds(rounds: Sequence[int], told: Any, usual: Behaviour) -> Behaviour:
    """Return a site that answers as ``usual`` and loses its network in ``rounds``."""

    def answer(message: Message) -> RecordDict:
        if told(message)["round"] in rounds:
            raise OSError("the network is down")
        return usual(message)

    return answer


def with_class_counts(participants: Participants, **counts: list[int]) -> Participants:
    """Return the participants named in ``counts``, each with these training samples by class."""
    facts = {}
    for site, own in counts.items():
        found = participants.facts[site]
        facts[site] = dataclasses.replace(found, label_counts=found.label_counts | {"train": own})
    return Participants(facts, {site: participants.nodes[site] for site in facts})
