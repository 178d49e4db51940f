"""A hospital under attack, and the levels of trust at which it is attacked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsilo.core.messages import ARRAYS
from fedsilo.models.privacy.accountant import noise_for
from tests.support.hospital import Hospital

Vector = np.ndarray[Any, Any]
Arrays = dict[str, Vector]
DELTA = 1e-5


@dataclass
class Asked:
    """A hospital under attack.

    Attributes:
        hospital: the hospital.
        messages: how many it was sent.
        answered: how many it answered.
        candidates: what may be rows of its patients.
    """

    hospital: Hospital
    messages: int = 0
    answered: int = 0
    candidates: list[Vector] = field(default_factory=list)

    def ask(self, phase: str, arrays: Mapping[str, Any] | None, **more: Any) -> Arrays | None:
        """Return the arrays that came back, in a run of its own for each message; or None.

        A method that keeps something at the site so starts from what the server sends.
        """
        self.messages += 1
        own = {"run_name": f"attack{self.messages}", "evaluate": False, "phase": phase}
        reply = self.hospital.send("train", arrays, **(own | more))
        if reply is None or ARRAYS not in reply:
            return None
        self.answered += 1
        return {n: array.numpy().astype(np.float64) for n, array in reply[ARRAYS].items()}


Attack = Callable[[Asked, np.random.Generator, int], None]


@dataclass(frozen=True)
class Level:
    """A level of trust as a hospital states it and an attacker's run meets it.

    Attributes:
        node: what the hospital's site file adds.
        run: what a run must say, so that the hospital answers at all.
    """

    node: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


def nobody(budget: float, releases: int) -> Level:
    """Return the level that trusts nobody; the attacker spreads the budget over all releases.

    The hospital's counts, whose noise is its own, leave nearly all of it.
    """
    counts = 20.0
    run = {
        "trust": "nobody",
        "sample_clip_norm": 1.0,
        "noise_multiplier": noise_for(
            budget, DELTA, lambda z: {(z, 1.0): releases, (counts, 1.0): 1}
        ),
        "statistics_clip_norm": 1e3,
    }
    return Level(
        {"trust": "nobody", "max-epsilon": budget, "delta": DELTA, "counts-noise": counts}, run
    )


SERVER = Level()
