"""Segmentation overlays: the image, the true mask and each network's prediction, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsilo.client_app.explain.image_explanation import draw_image
from fedsilo.models.maths.segmentation_metrics import image_dice, overlaps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that colour-blind people can distinguish too (Okabe and Ito)
TRUTH = (0.34, 0.71, 0.91)
HIT, FALSE, MISSED = (0.0, 0.75, 0.45), (0.95, 0.75, 0.0), (0.9, 0.2, 0.75)
_LEGEND = {"truth": TRUTH, "found": HIT, "found where none is": FALSE, "missed": MISSED}
_OPACITY = 0.75


def spread(origin: Sequence[str], count: int) -> list[int]:
    """Return at most ``count`` rows: the first of each site, then the second, and so on."""
    by_site: dict[str, list[int]] = {}
    for row, site in enumerate(origin):
        by_site.setdefault(site, []).append(row)
    turns = [(turn, row) for rows in by_site.values() for turn, row in enumerate(rows)]
    return sorted(row for _, row in sorted(turns)[:count])


def coloured(predicted: Tensor, mask: Tensor) -> Tensor:
    """Return the overlay (h, w, 4) of a predicted and a true mask (h, w), transparent elsewhere."""
    marked, true = predicted.bool(), mask.bool()
    layer = torch.zeros(*mask.shape, 4)
    for chosen, colour in ((marked & true, HIT), (marked & ~true, FALSE), (~marked & true, MISSED)):
        layer[chosen] = torch.tensor([*colour, _OPACITY])
    return layer


def draw_overlays(
    images: Tensor,
    masks: Tensor,
    predicted: Mapping[str, Tensor],
    names: Sequence[str],
    title: str,
) -> Figure:
    """Paint a row per image (n, channels, h, w): the image, its mask (n, h, w), each prediction."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = 2 + len(predicted)
    size = (2.5 * columns, 1.0 + 2.7 * len(images))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(images), columns, squeeze=False)
    dice = {label: image_dice(overlaps(marked, masks)) for label, marked in predicted.items()}
    for row, (first, second, *others) in enumerate(panels):
        _panel(first, images[row], None, names[row])
        truth = torch.zeros(*masks[row].shape, 4)
        truth[masks[row].bool()] = torch.tensor([*TRUTH, _OPACITY])
        _panel(second, images[row], truth, "" if masks[row].any() else "(no catheter)")
        for axes, (label, marked) in zip(others, predicted.items(), strict=True):
            value = float(dice[label][row])
            caption = "(rightly none)" if value != value else f"Dice {value:.2f}"
            _panel(axes, images[row], coloured(marked[row], masks[row]), caption)
    for axes, head in zip(panels[0], ["image", "truth", *predicted], strict=True):
        axes.set_title(head, fontsize="small", wrap=True)
    patches = [Patch(color=colour, label=name) for name, colour in _LEGEND.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _panel(axes: Axes, image: Tensor, layer: Tensor | None, caption: str) -> None:
    draw_image(axes, image)
    if layer is not None:
        # draw_image shrinks a large image, so the layer takes its extent
        axes.imshow(layer.numpy(), interpolation="nearest", extent=axes.images[0].get_extent())
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)
    axes.set_xlabel(caption, fontsize="small")
