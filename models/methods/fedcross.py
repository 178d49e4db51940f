"""FedCross (Hu et al. 2024): as many models as sites, each mixed a little with another.

In each round every site trains one of the models, drawn anew. Then each model becomes
alpha times itself plus 1 - alpha times a collaborator: by default the model that is least like it,
by the cosine of all trained weights. The model that is measured and kept is the mean of all.

Equations (arXiv:2210.08285):
  (algorithm 1, CoModelSel) the collaborator of each model -> models.methods.fedcross.collaborators
  (CrossAggr) mixing -> strategies.methods.fedcross.FedCross.round
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting

Choice = Literal["lowest", "highest", "in-order"]


@dataclass(frozen=True)
class FedCrossSettings(OwnSettings):
    """Settings of FedCross, with the paper's defaults; its accelerated start is left out."""

    title = "FedCross"
    server = "fedsilo.strategies.methods.fedcross:FedCross"
    site = "fedsilo.client_app.methods.fedcross:FedCrossSite"

    cross_alpha: float = setting(
        0.99, "alpha: weight of a model itself when it is mixed with another", ge=0.5, lt=1.0
    )
    collaborator: Choice = setting(
        "lowest", "which other model: of lowest or highest cosine similarity, or each in turn"
    )


def collaborators(vectors: Any, choice: Choice, round_: int) -> list[int]:
    """Choose a collaborator for each model, another model with which the server mixes it.

    Args:
        vectors: the models' trained weights, (models, weights) float64, for at least two models.
        choice: "lowest" takes the model whose weights have the lowest cosine similarity. "highest"
            takes the model with the highest similarity. On a tie the lower index is taken.
            "in-order" takes all other models in turn: in round r, model i of n gets the model (i +
            1 + (r mod (n - 1))) mod n.
        round_: r, the number of the round, from 1. Only "in-order" uses it.

    Returns:
        For each model, in order, the index of its collaborator, from 0.
    """
    count = len(vectors)
    if choice == "in-order":
        offset = round_ % (count - 1) + 1
        return [(place + offset) % count for place in range(count)]
    lengths = np.linalg.norm(vectors, axis=1)
    # Weights of zero are like nothing: dividing by their length would give NaN
    units = vectors / np.maximum(lengths, np.finfo(float).tiny)[:, None]
    similarities = units @ units.T
    if choice == "highest":
        similarities = -similarities
    # No model is its own collaborator
    np.fill_diagonal(similarities, np.inf)
    return [int(place) for place in similarities.argmin(axis=1)]
