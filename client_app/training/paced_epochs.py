"""Epochs that span rounds: a round has 'train.pace' steps of an epoch with 'train.epoch-steps'.

The optimiser, the epoch's order of samples and the position in it are the site's own state, under
names that begin with ``pace/``. The optimiser's state has such names even if epochs do not span
rounds. Epochs are counted by the rounds of the run, so all sites begin an epoch together. A site
that missed a round continues at its position, and skips the rest when the next epoch begins.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.client_app.training.optimisers import moments_of, open_optimiser, restore_moments
from fedsilo.core.array_names import arrays_below
from fedsilo.core.errors import SiteError
from fedsilo.core.seeding import generator
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.pacing import batch_of, begins_epoch, epoch_of

PREFIX = "pace/"
_EPOCH, _POSITION, _ORDER, _OPTIMISER = "epoch", "position", "order", "optimiser/"


@dataclass
class Pacing:
    """A site's position in an epoch that spans rounds."""

    epoch: int  # the epoch, from 0
    position: int  # the steps of the epoch that the site has taken
    order: Tensor  # (n,) the training samples in the order of this epoch
    steps: int  # the number of steps in this round
    size: int  # the number of samples in a step

    def batches(self) -> list[Tensor]:
        """Return the sample indices of each step in this round, one tensor (``size``,) per step.

        The steps continue in the epoch's ``order`` of samples, after the ``position`` steps already
        taken. After the last sample of the order, the first sample follows again. An epoch runs out
        of samples before its last step only at a site with few samples, because every step takes
        at least two.
        """
        # (steps * size,) positions in the epoch's order, wrapped around its end
        places = torch.arange(self.steps * self.size) + self.position * self.size
        return list(torch.split(self.order[places % len(self.order)], self.size))

    def next_state(self) -> dict[str, Tensor]:
        """Return the arrays to store: the epoch, the order, and the position after this round.

        The names are "pace/epoch", "pace/order" and "pace/position". The position is the number of
        steps taken in the epoch.
        """
        return {
            f"{PREFIX}{_EPOCH}": torch.tensor(self.epoch),
            f"{PREFIX}{_POSITION}": torch.tensor(self.position + self.steps),
            f"{PREFIX}{_ORDER}": self.order,
        }


def train_continued(
    training: LocalTraining,
    stored: Mapping[str, Tensor],
    round_: int,
    site: str,
    order: Callable[[int], Tensor | None] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Train from the point where the site's last round stopped; return the loss and the new state.

    The optimiser continues with its stored moments, such as Adam's running means. A parameter that
    is new, or whose shape has changed, begins with new moments. If 'train.epoch-steps' is set, an
    epoch spans several rounds. The training then also continues at the stored position in the
    epoch.

    Args:
        training: the training, whose ``optimiser`` is set. If an epoch spans rounds, its ``plan``,
            the batches of this round, is also set.
        stored: the site's state before this message; may be empty.
        round_: the round, from 1.
        site: the site's name.
        order: returns the order (n,) of the samples in a given epoch, or None for a random order;
            used only if an epoch spans rounds.

    Returns:
        The mean loss over the last pass, and the arrays to store for the next round.

    Raises:
        SiteError: the training diverged, or the number of training samples has changed within an
            epoch.
        RefusedError: the training has fewer steps, or fewer samples in a batch, than the hospital
            requires.
    """
    network, settings = training.network, training.settings

    def new_order(epoch: int) -> Tensor:
        chosen = None
        if order:
            chosen = order(epoch)
        if chosen is None:
            chosen = shuffle_epoch(training.samples, settings, epoch, site)
        return chosen

    training.optimiser = open_optimiser(network, settings)
    kept: dict[str, Tensor] = {}
    if settings.epoch_steps:
        pacing = open_pacing(stored, round_, training.samples, settings, new_order)
        training.plan = [pacing.batches()]
        kept = pacing.next_state()
    restore_moments(training.optimiser, network, arrays_below(f"{PREFIX}{_OPTIMISER}", stored))
    loss = training.run()
    for name, moment in moments_of(training.optimiser, network).items():
        kept[f"{PREFIX}{_OPTIMISER}{name}"] = moment
    return loss, kept


def shuffle_epoch(count: int, settings: CommonSettings, epoch: int, site: str) -> Tensor:
    """Draw a random order (count,) of an epoch's training samples at a site."""
    rng = generator(settings.seed, "epoch-order", epoch, site)
    return torch.randperm(count, generator=rng)


def open_pacing(
    stored: Mapping[str, Tensor],
    round_: int,
    samples: int,
    settings: CommonSettings,
    new_order: Callable[[int], Tensor],
) -> Pacing:
    """Return the site's position in its epoch, and the order of its samples, for this round.

    An epoch spans several rounds here. Within an epoch, the stored position and order are used. At
    the start of an epoch, or if no state of this epoch is stored, the position is 0 and the order
    is new.

    Args:
        stored: the site's state before this message; may be empty.
        round_: the round, from 1.
        samples: the number of the site's training samples.
        settings: the number of steps in an epoch and in a round.
        new_order: returns the order (samples,) of the samples in a given epoch.

    Raises:
        SiteError: the number of the site's training samples has changed since an earlier round of
            this epoch.
    """
    epoch, size = epoch_of(round_, settings), batch_of(samples, settings)
    known = stored.get(f"{PREFIX}{_EPOCH}")
    goes_on = known is not None and int(known) == epoch and not begins_epoch(round_, settings)
    if not goes_on:
        return Pacing(epoch, 0, new_order(epoch), settings.pace, size)
    position, order = int(stored[f"{PREFIX}{_POSITION}"]), stored[f"{PREFIX}{_ORDER}"]
    refuse_other_data(len(order), samples)
    return Pacing(epoch, position, order, settings.pace, size)


def refuse_other_data(before: int, now: int) -> None:
    """Check that the number of the site's training samples has not changed since an earlier round.

    Only the numbers are compared, not the samples.

    Raises:
        SiteError: ``before`` and ``now`` differ. The error gives the two numbers.
    """
    if before != now:
        raise SiteError(
            f"the training data changed during the run: {before} samples before, {now} now; bring "
            "them back, or choose another 'run.name'"
        )
