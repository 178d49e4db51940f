"""What a method takes of what the settings may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from models.contract.errors import SettingError
from models.contract.settings import CommonSettings


@dataclass(frozen=True)
class Capabilities:
    """What a method takes; a run that asks it for more is refused before anything is trained.

    Attributes:
        vit: the network can be a ViT, of whose frozen backbone the server knows nothing.
        tables: the data can be a table.
        evidence: the network can be evidential.
        privacy: clipping and noise can bound what a site gives away.
        late_join: a site may join a run that has begun.
        paced_epochs: an epoch may span rounds.
        initial_weights: the server sends what sites start from.
    """

    vit: bool = True
    tables: bool = True
    evidence: bool = True
    privacy: bool = True
    late_join: bool = False
    paced_epochs: bool = False
    initial_weights: bool = False

    def refuse_more(self, common: CommonSettings, is_table: bool) -> None:
        """Refuse settings that the method does not take.

        Raises:
            SettingError: it names the method, the setting and what to set.
        """
        method = f"method '{common.method}'"
        asked_and_missing = (
            (
                common.epoch_steps and not self.paced_epochs,
                f"{method} does not take 'epoch-steps', epochs that span rounds: set it to 0",
            ),
            (
                common.initial_weights and not self.initial_weights,
                f"{method} does not take 'initial-weights': leave it empty",
            ),
            (
                common.network == "vit" and not self.vit,
                f"{method} does not take network 'vit': choose another",
            ),
            (
                is_table and not self.tables,
                f"{method} is of images, and data set '{common.dataset}' is a table: choose "
                "another",
            ),
            (
                common.loss == "evidential" and not self.evidence,
                f"{method} mixes probabilities, which are no evidence: leave 'loss' at 'auto'",
            ),
            (
                common.clip_norm and not self.privacy,
                f"{method} pools the data of all sites, whose parts clipping does not bound: set "
                "'clip-norm' and 'noise-multiplier' to 0, or choose another method",
            ),
        )
        for missing, reason in asked_and_missing:
            if missing:
                raise SettingError(reason)
