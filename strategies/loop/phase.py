"""One phase of a round: which messages it sends, and what is known of them until it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedsilo.models.contract.messages import EVALUATE, TRAIN, TRAINING


@dataclass
class Phase:
    """A phase while it runs.

    Attributes:
        name: the phase's name, of the method; ``EVALUATE`` for the evaluation that ends a run.
        round: the round that it belongs to, from 1; the final evaluation's is the last one.
        step: its position in the round, from 0.
        measures: whether its round measures the incoming model.
        sent: bytes sent, by site that was asked.
        errors: what sites answered that could not do what they were asked: text, by site.
        codes: the codes of those errors, by site.
    """

    name: str
    round: int
    step: int = 0
    measures: bool = True
    sent: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)

    @property
    def message_round(self) -> int:
        """The round that its messages name: the final evaluation comes after the last one."""
        return self.round + (self.name == EVALUATE)

    @property
    def kind(self) -> str:
        """Flower's message type."""
        return EVALUATE if self.name == EVALUATE else TRAIN

    @property
    def evaluates(self) -> bool:
        """Whether a site measures the model that comes."""
        return self.name == EVALUATE or (self.name in TRAINING and self.measures)
