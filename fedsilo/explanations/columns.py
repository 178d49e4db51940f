"""Explain a prediction for a table's row by Shapley values of its columns, for any network.

Columns become known one after another, in random orders. The value of a column is the gain in the
prediction's probability when the column becomes known, averaged over the orders (Strumbelj and
Kononenko 2010, computed by captum). An unknown column has the mean of the training rows. The values
of a row sum to the row's probability minus the probability of the mean row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedsilo.core.drawing.palette import BLUE, ORANGE
from fedsilo.core.drawing.panels import literal
from fedsilo.core.seeding import seed_generators
from fedsilo.models.networks.site_network import SiteNetwork

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHOD = "Shapley values by 25 random orders of the columns"
_ORDERS = 25


@dataclass(frozen=True)
class ColumnExplanation:
    """The contribution of each column to the probability of one row's predicted class."""

    title: str  # names the row and its prediction
    columns: list[str]  # the names of the columns
    contributions: list[float]  # the Shapley value of each column; negative lowers the probability
    probability: float  # the probability of the predicted class, from one pass without dropout
    mean_probability: float  # the probability of that class for the mean training row

    def document(self) -> dict[str, Any]:
        """Return the explanation as a JSON object: the fields of this class, and ``method``."""
        return vars(self) | {"method": METHOD}

    def lines(self) -> list[str]:
        """Format the explanation as lines of text.

        The first line is the title. The second gives two probabilities of the predicted class: for
        this row, and for the mean row. Then each column has a line with its contribution, the
        largest absolute value first. The last line names the method of explanation.
        """
        pairs = list(zip(self.columns, self.contributions, strict=True))
        pairs.sort(key=lambda pair: -abs(pair[1]))
        lines = [
            self.title,
            f"probability {self.probability:.3f}; of the mean row {self.mean_probability:.3f}",
        ]
        for name, value in pairs:
            lines.append(f"  {name}: {value:+.3f}")
        lines.append(METHOD)
        return lines

    def figure(self) -> Figure:
        """Draw how much each column adds to the probability of the predicted class.

        The bars follow the order of the table, from top to bottom. An orange bar lowers the
        probability, a blue bar does not.
        """
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
    """Return the names of the table's columns, each once, in the order of the features.

    A categorical column has a feature ``column=level`` for each level except the first. A numeric
    column has one feature with the column's name.
    """
    return list(dict.fromkeys(name.partition("=")[0] for name in features))


def probabilities_of(outputs: Tensor) -> Tensor:
    """Map the outputs of a classifier (batch, classes) to probabilities."""
    return torch.softmax(outputs.float(), dim=-1)


def column_contributions(
    network: SiteNetwork,
    rows: Tensor,
    features: Sequence[str],
    answers: Tensor,
    predict: Callable[[Tensor], Tensor] = probabilities_of,
) -> tuple[Tensor, Tensor]:
    """Compute how much each column of a table contributes to a prediction, as Shapley values.

    The mean row has 0 in every feature. A row's contributions sum to its prediction minus the
    prediction for the mean row. All features of a categorical column count as one column. The
    values are estimated with a fixed seed, so equal calls give equal values.

    Args:
        network: on its device; it is put in eval mode.
        rows: (k, f) on any device, standardised by the training rows.
        features: the names of the f features.
        answers: (k,) int64, the number of the output to explain in each row.
        predict: maps the network's outputs (batch, outputs) to predictions of the same shape. The
            default gives the probabilities of the classes.

    Returns:
        The contributions (k, columns) in the order of ``columns_of``, and the explained predictions
        (k,), on the CPU.
    """
    from captum.attr import ShapleyValueSampling

    names = columns_of(features)
    # All levels of a category become known together, because they are one column
    column_of = []
    for feature in features:
        column_of.append(names.index(feature.partition("=")[0]))
    groups = torch.tensor([column_of])  # (1, f): the number of each feature's column
    device = next(network.parameters()).device
    inputs, groups = rows.float().to(device), groups.to(device)
    network.eval()

    # The number that the page shows is explained, such as days, and not the network's raw output
    def prediction(x: Tensor) -> Tensor:
        return predict(network(x)).float()

    with torch.no_grad(), seed_generators(0, "shapley", device=device):
        found = ShapleyValueSampling(prediction).attribute(
            inputs, target=answers.to(device), feature_mask=groups, n_samples=_ORDERS
        )
        own = prediction(inputs).gather(1, answers.to(device)[:, None])[:, 0]
    # captum repeats a column's value for each of its features, so the first feature has it
    first = [column_of.index(place) for place in range(len(names))]
    return found[:, first].cpu(), own.cpu()


def explain_columns(
    network: SiteNetwork, row: Tensor, features: Sequence[str], classes: Sequence[str], title: str
) -> ColumnExplanation:
    """Explain a network's prediction for one row of a table by Shapley values of its columns.

    The explained number is the probability of the predicted class. That class is the largest
    output.

    Args:
        network: on its device; it is put in eval mode.
        row: (f,), standardised, so that 0 is the mean of the training rows.
        features: the names of the f features.
        classes: the names of the classes.
        title: a name for the row. The title of the explanation adds the predicted class.
    """
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
        # Shapley values sum to the probability minus that of the mean row
        (own[0] - parts[0].sum()).item(),
    )
