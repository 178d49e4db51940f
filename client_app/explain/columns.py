"""What each column of a table adds to a model's answer: Shapley values, for any network.

The value of a column is what the probability of the answer gains on average when the column is
known, over orders in which the columns become known (Strumbelj and Kononenko 2010, by captum). A
column that is not known has the mean of the training rows. The values of a case add up to its
probability less that of the mean row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedsilo.models.contract.seeding import seed_generators
from fedsilo.models.figures.palette import BLUE, ORANGE
from fedsilo.models.figures.panels import literal
from fedsilo.models.networks.site_network import SiteNetwork

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHOD = "Shapley values by 25 random orders of the columns"
_ORDERS = 25


@dataclass(frozen=True)
class ColumnExplanation:
    """What each column of one case adds to the probability of its answer."""

    title: str  # names the case and its answer
    columns: list[str]  # their names
    contributions: list[float]  # what each adds
    probability: float  # of the answer, in one pass without dropout
    mean_probability: float  # the same of the mean row

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return vars(self) | {"method": METHOD}

    def lines(self) -> list[str]:
        """Return it as text, the columns that matter most first."""
        pairs = sorted(
            zip(self.columns, self.contributions, strict=True), key=lambda pair: -abs(pair[1])
        )
        return [
            self.title,
            f"probability {self.probability:.3f}; of the mean row {self.mean_probability:.3f}",
            *(f"  {name}: {value:+.3f}" for name, value in pairs),
            METHOD,
        ]

    def figure(self) -> Figure:
        """Draw a bar for each column."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 1.4 + 0.3 * len(self.columns)), layout="constrained")
        axes = figure.subplots()
        colours = [BLUE if value >= 0 else ORANGE for value in self.contributions]
        axes.barh([literal(name) for name in self.columns], self.contributions, color=colours)
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel("adds to the probability of the answer")
        figure.suptitle(literal(self.title), fontsize="small")
        return figure


def columns_of(features: Sequence[str]) -> list[str]:
    """Return the columns that features, ``column=level`` of categories, are made of, each once."""
    return list(dict.fromkeys(name.partition("=")[0] for name in features))


def column_contributions(
    network: SiteNetwork, rows: Tensor, features: Sequence[str], answers: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what each column adds to the probability of each row's answer, and that probability.

    Args:
        network: on its device; it is put in eval mode.
        rows: (k, f), as the network gets them; 0 is the mean of the training rows.
        features: their names.
        answers: (k,), the class that is explained of each.

    Returns:
        (k, columns) contributions and (k,) probabilities, on the CPU.
    """
    from captum.attr import ShapleyValueSampling

    names = columns_of(features)
    groups = torch.tensor([[names.index(name.partition("=")[0]) for name in features]])
    device = next(network.parameters()).device
    inputs, groups = rows.float().to(device), groups.to(device)
    network.eval()

    def probability(x: Tensor) -> Tensor:
        return torch.softmax(network(x).float(), dim=-1)

    with torch.no_grad(), seed_generators(0, "shapley", device=device):
        found = ShapleyValueSampling(probability).attribute(
            inputs, target=answers.to(device), feature_mask=groups, n_samples=_ORDERS
        )
        own = probability(inputs).gather(1, answers.to(device)[:, None])[:, 0]
    first = [list(groups[0]).index(place) for place in range(len(names))]
    return found[:, first].cpu(), own.cpu()


def explain_columns(
    network: SiteNetwork, row: Tensor, features: Sequence[str], classes: Sequence[str], title: str
) -> ColumnExplanation:
    """Explain the answer to one row (f,); it is appended to ``title``."""
    network.eval()
    with torch.no_grad():
        device = next(network.parameters()).device
        answer = network(row[None].float().to(device)).argmax(dim=1).cpu()
    parts, own = column_contributions(network, row[None], features, answer)
    return ColumnExplanation(
        f"{title}; predicted {classes[int(answer)]}",
        columns_of(features),
        parts[0].tolist(),
        own[0].item(),
        (own[0] - parts[0].sum()).item(),
    )
