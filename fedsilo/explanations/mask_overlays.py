"""``fedsilo overlays``: draws a site's best, median and worst segmented images with both outlines.

Everything here runs at the hospital that has the images; nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.core.drawing.palette import CATEGORIES, SKY, VERMILLION
from fedsilo.core.drawing.panels import literal, without_frame
from fedsilo.core.errors import SettingError
from fedsilo.core.tasks import SEGMENTATION
from fedsilo.explanations.image_explanation import draw_image
from fedsilo.models.measures.mask_metrics import image_scores
from fedsilo.pictures.panel_grids import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = Literal["solid", "dashed"]
_TRUTH: Line = "solid"
_FOUND: Line = "dashed"


@dataclass(frozen=True)
class _Case:
    """One image of a split: what it is an example of, its row and its Dice score."""

    name: str  # such as "best"
    row: int  # counted from 0
    dice: float  # 0 to 1


def overlay_sheet(lab: Lab, split: str) -> Figure | None:
    """Draw up to three images of a site: those with the best, the median and the worst Dice.

    Each image has a row of two panels: the image alone, and the image with outlines. Solid lines
    outline the true mask, and dashed lines the predicted mask. An image's score is the mean Dice
    over the classes in either mask, without the background.

    Args:
        lab: the site's data and its model after the run.
        split: 'train', 'val' or 'test'.

    Returns:
        The picture; None if the split has no images, or if all true and predicted masks are empty.

    Raises:
        SettingError: the run's task is not segmentation.
    """
    if lab.common.task != SEGMENTATION:
        raise SettingError(
            f"the run has task '{lab.common.task}', but only segmentation has masks to draw: name "
            f"a run of task '{SEGMENTATION}'"
        )
    held, classes = lab.silo.splits()[split], lab.silo.class_names()
    if not len(held):
        return None
    network = lab.open()
    found = over_batches(
        network, held.inputs, lab.compute.exact(), lambda batch: network(batch).argmax(dim=1)
    ).long()
    scores = image_scores(found, held.labels, len(classes))
    cases = choose_cases(scores)
    if not cases:
        return None
    title = f"{lab.silo.name}: {split} images by their Dice score"
    figure = new_figure(5.4, 1.2 + 2.7 * len(cases))
    panels = figure.subplots(len(cases), 2, squeeze=False)
    for (plain, marked), case in zip(panels, cases, strict=True):
        image, truth = held.inputs[case.row], held.labels[case.row]
        _draw_case(plain, marked, image, {_TRUTH: truth, _FOUND: found[case.row]})
        plain.set_ylabel(f"{case.name}, row {case.row}", fontsize="small")
        marked.set_xlabel(f"Dice {case.dice:.2f}", fontsize="small")
    _add_legend(figure, classes[1:], {_TRUTH: ", true", _FOUND: ", predicted"})
    figure.suptitle(literal(title), fontsize="medium")
    return figure


def choose_cases(scores: Tensor) -> list[_Case]:
    """Choose the images with the best, the median and the worst score, each image once.

    For an even number of images, the median is the lower of the two middle scores. Among equal
    scores, the image with the lower number ranks as better. Images without a score (NaN) are left
    out. A single image is the best. Of two images, the worse one is the median. Without images, the
    list is empty.

    ``scores`` is a tensor (n,) with the score of each image.
    """
    ranked: list[tuple[float, int]] = []
    for row, score in enumerate(scores.tolist()):
        if not math.isnan(score):
            ranked.append((-score, row))
    ranked.sort()
    cases = []
    chosen = {"best": 0, "median": len(ranked) // 2, "worst": len(ranked) - 1}
    drawn: set[int] = set()
    for name, place in chosen.items():
        if ranked and place not in drawn:
            drawn.add(place)
            cases.append(_Case(name, ranked[place][1], -ranked[place][0]))
    return cases


def draw_marked(figure: Figure, image: Tensor, mask: Tensor, classes: Sequence[str]) -> None:
    """Draw an image beside the same image with the outlines of a mask, one colour per class.

    Args:
        figure: an empty figure.
        image: (channels, h, w).
        mask: (h, w), the class of each pixel; 0 is the background.
        classes: the names of the classes from 1 on, for the legend.
    """
    plain, marked = figure.subplots(1, 2)
    _draw_case(plain, marked, image, {_TRUTH: mask})
    _add_legend(figure, classes, {_TRUTH: ""})


def _draw_case(plain: Axes, marked: Axes, image: Tensor, masks: dict[Line, Tensor]) -> None:
    """Draw an image twice: alone, and with the outlines of masks.

    Args:
        plain: the panel of the image alone.
        marked: the panel of the image with outlines.
        image: the image (channels, h, w), as a site stores it.
        masks: the line style and the mask of each set of outlines. A mask (h, w) holds class
            numbers, and its class 0 is not outlined.
    """
    for axes in (plain, marked):
        draw_image(axes, image)
        without_frame(axes)
    for style, mask in masks.items():
        for number in sorted(set(torch.unique(mask).tolist()) - {0}):
            _draw_outline(marked, (mask == number).numpy(), _colour(int(number), style), style)


def _draw_outline(axes: Axes, mask: npt.NDArray[np.bool_], colour: str, style: Line) -> None:
    """Draw the outline of one class over the image that a panel already shows.

    Args:
        axes: the panel. If its image has fewer pixels than the mask, the mask still covers all of
            it.
        mask: bool (h, w), True for the pixels of the class.
        colour: the colour of the line.
        style: the style of the line.
    """
    # draw_image shrinks a large image, so the pixels' centres follow from its extent
    left, right, bottom, top = axes.images[0].get_extent()
    rows, columns = mask.shape
    x = left + (np.arange(columns) + 0.5) / columns * (right - left)
    y = top + (np.arange(rows) + 0.5) / rows * (bottom - top)
    axes.contour(x, y, mask, levels=[0.5], colors=[colour], linestyles=[style], linewidths=1.2)


def _colour(number: int, style: Line) -> str:
    """Return the colour of the outline of class ``number``, counted from 1.

    The first class is often the only one. It has one colour for true masks (solid lines) and
    another for predicted masks (dashed lines), to tell them apart easily. Any other class has the
    same colour in both styles. If there are many classes, colours repeat.
    """
    if number == 1:
        return SKY if style == _TRUTH else VERMILLION
    return CATEGORIES[number % len(CATEGORIES)]


def _add_legend(figure: Figure, classes: Sequence[str], ends: Mapping[Line, str]) -> None:
    """Add a legend below the panels, with an entry for each line style and class.

    Args:
        figure: the figure.
        classes: the names of the classes without the background.
        ends: each line style with the text that follows the class's name, such as ", true".
    """
    from matplotlib.lines import Line2D

    handles = []
    for style, end in ends.items():
        for number, name in enumerate(classes, start=1):
            label, colour = f"{literal(name)}{end}", _colour(number, style)
            handles.append(Line2D([], [], color=colour, linestyle=style, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize="small")
