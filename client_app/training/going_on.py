"""An optimiser that goes on over the rounds of a run (``optimiser-state`` "run").

Its moments are the site's own state, under the names that epochs across rounds have for theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from fedsilo.client_app.training.loop import LocalTraining, open_optimiser, train_locally
from fedsilo.client_app.training.pacing import restore_optimiser, stored_optimiser


def train_on(
    training: LocalTraining, stored: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Train with the optimiser as the round before left it.

    A parameter that is new, or of another shape than it was, begins afresh; so does what a method
    trains beside its network.

    Args:
        training: its ``optimiser`` is that of the site's state instead.
        stored: the site's state, maybe empty.

    Returns:
        The mean loss over the last epoch, and the optimiser's part of the site's new state.
    """
    optimiser = open_optimiser(training.network, training.settings)
    restore_optimiser(optimiser, training.network, stored)
    loss = train_locally(replace(training, optimiser=optimiser))
    return loss, stored_optimiser(optimiser, training.network)
