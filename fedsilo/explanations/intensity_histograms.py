"""``fedsilo histograms``: draws the brightness of each site's images, as stored and as seen.

The Fed-Align-CL paper's figure 1 (right). It runs where the images are; only what is drawn leaves
the site. Background, which differs in extent more than tissue differs in brightness, is left
out: all pixels that equal their image's least value, as padding does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedsilo.client_app.training.evaluation import in_batches
from fedsilo.core.drawing.palette import LineStyle, line_styles
from fedsilo.core.drawing.panels import line_legend
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.pictures.panel_grids import new_figure
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.runs.trained_site import check_same_samples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Form = Literal["stored", "seen"]  # pixels as the silo stores them, or as the network is given them

_BINS = 64
_MARKED = 8  # bins from one marker of a line to the next
_TAIL = 0.0005  # share of the pixels at either end that a picture leaves out
_CUT = 2.5  # a peak this many times as high as the next to highest hundredths is cut off
# Scale and offset that bring stored pixels to 0..1
_SCALES = {torch.uint8: (255.0, 0.0), torch.int16: (65535.0, 32768.0)}


@dataclass(frozen=True)
class Histograms:
    """Distributions of pixels over common bins."""

    edges: Tensor  # (bins + 1,)
    densities: dict[str, Tensor]  # site -> (bins,); times the bins' width they sum to 1


@dataclass(frozen=True)
class SiteHistograms:
    """The intensities of a run's sites."""

    title: str  # the data set and split
    stored: Histograms  # histograms of the stored pixels, scaled to 0..1
    seen: Histograms  # histograms of the network's inputs
    labels: dict[str, str]  # site -> its name in the legend


def open_silos(
    run: FinishedRun, common: CommonSettings, sites: Sequence[str], split: str
) -> dict[str, Silo]:
    """Load the images of a run's sites; ``common`` are the run's settings on this machine.

    Raises:
        SettingError: the run's data are a table.
        DataError: the split is not that of the run.
    """
    silos = {}
    for site in sites:
        silo = load_silo(site, common)
        check_same_samples(run.path, run.silos[site], silo, split)
        if silo.features:
            raise SettingError(
                f"data set '{common.dataset}' of {run.path} is a table, which has no pixels "
                "to draw histograms of: name a run on images"
            )
        silos[site] = silo
    return silos


def site_histograms(dataset: str, silos: Mapping[str, Silo], split: str) -> SiteHistograms:
    """Compute the intensity histograms of the silos that have images in the split.

    Raises:
        DataError: no silo has images, or all of them show only background.
    """
    splits, labels = {}, {}
    for site, silo in silos.items():
        if len(silo.splits()[split]):
            splits[site] = silo.splits()[split]
            labels[site] = _label(silo, split)
    stored, seen = measure_pixels(splits)
    return SiteHistograms(f"{split} images of {dataset}", stored, seen, labels)


def measure_pixels(splits: Mapping[str, Split]) -> tuple[Histograms, Histograms]:
    """Return two histograms: of the stored pixels scaled to 0 to 1, and of a network's inputs.

    8-bit pixels are divided by 255, int16 ones are (v + 32768) / 65535, floats are as they are.

    Raises:
        DataError: there are no images, or all of them show only background.
    """
    kinds = {split.inputs.dtype for split in splits.values()}
    if not kinds:
        raise DataError("no site has images of that split: choose another --split")
    stored_step = seen_step = 0.0  # standardised images have no levels
    if kinds <= _SCALES.keys():
        stored_step = 1 / max(_SCALES[kind][0] for kind in kinds)
    if kinds == {torch.uint8}:
        seen_step = 2 / 255
    return _measure(splits, "stored", stored_step), _measure(splits, "seen", seen_step)


def _measure(splits: Mapping[str, Split], form: Form, step: float) -> Histograms:
    edges = _edges(splits, form, step)
    densities = {site: _density(split, form, edges) for site, split in splits.items()}
    return Histograms(edges, densities)


def _foreground(split: Split, form: Form) -> Iterator[Tensor]:
    """Yield pixels (n,) that are not background, float32."""
    for batch in in_batches(split.inputs):
        # The darkest value of an image is its background: the black around a breast or a lesion
        axes = tuple(range(1, batch.ndim))
        kept = batch > batch.amin(dim=axes, keepdim=True)
        if form == "seen":
            pixels = float_inputs(batch)[kept]
        else:
            scale, offset = _SCALES.get(batch.dtype, (1.0, 0.0))
            pixels = (batch[kept].float() + offset) / scale
        if len(pixels):
            yield pixels


def _edges(splits: Mapping[str, Split], form: Form, step: float) -> Tensor:
    """Return the edges of the bins over all sites' pixels.

    ``step`` is the distance between two levels of pixels, 0 if pixels have no levels. All bins have
    the same number of levels, because otherwise high and low bars would alternate.
    """
    low, high = math.inf, -math.inf
    for split in splits.values():
        for pixels in _foreground(split, form):
            low = min(low, pixels.min().item())
            high = max(high, pixels.max().item())
    if low > high:
        raise DataError("the images are of one value each, background only: there is no histogram")
    if step:
        # Edges lie half a step below a level, so that rounding cannot move a pixel to another bin
        levels = round((high - low) / step) + 1
        per_bin = max(1, math.ceil(levels / _BINS))
        bins = math.ceil(levels / per_bin)
        return low + step * (per_bin * torch.arange(bins + 1, dtype=torch.float64) - 0.5)
    margin = max((high - low) * 1e-6, 1e-6)
    return torch.linspace(low - margin, high + margin, _BINS + 1, dtype=torch.float64)


def _density(split: Split, form: Form, edges: Tensor) -> Tensor:
    """Return the density (bins,) of a site's pixels over the bins between ``edges``."""
    bins, low, high = len(edges) - 1, edges[0].item(), edges[-1].item()
    counts = torch.zeros(bins, dtype=torch.float64)
    for pixels in _foreground(split, form):
        counts += torch.histc(pixels, bins, low, high).double()
    return counts / counts.sum().clamp_min(1) / (edges[1] - edges[0])


def draw_histograms(measured: SiteHistograms) -> Figure:
    """Draw a line per site: on the left the stored pixels, on the right the network's inputs."""
    figure = new_figure(10, 4.6)
    left, right = figure.subplots(1, 2)
    styles = line_styles(list(measured.labels))
    _draw(left, measured.stored, styles, "As stored")
    left.set_xlabel("pixel value, without background (an image's least value)")
    _draw(right, measured.seen, styles, "As the network is given them")
    right.set_xlabel("input value, without background")
    legend = {label: styles[site] for site, label in measured.labels.items()}
    line_legend(figure, legend, columns=4)
    figure.suptitle(measured.title, fontsize="medium")
    return figure


def _draw(axes: Axes, histograms: Histograms, styles: Mapping[str, LineStyle], title: str) -> None:
    centres = (histograms.edges[:-1] + histograms.edges[1:]) / 2
    for site, density in histograms.densities.items():
        style = styles[site]
        axes.plot(
            centres, density, linewidth=1.4, markersize=4, markevery=_MARKED, **style.options()
        )
        axes.fill_between(centres, density, color=style.color, alpha=0.06, linewidth=0)
    densities = torch.stack(list(histograms.densities.values()))
    # Leave out the ends of the axis where almost no pixel of any site is
    total = densities.sum(dim=0).cumsum(dim=0)
    inside = (total > _TAIL * total[-1]) & (total < (1 - _TAIL) * total[-1])
    inside |= ~inside.any()  # all of the axis, if a single bin has all pixels
    shown = centres[inside]
    axes.set_xlim(shown[0].item(), shown[-1].item())
    axes.set_title(title + _limit(axes, densities[:, inside].flatten()), fontsize="medium")
    axes.set_ylabel("density of pixels")
    axes.grid(alpha=0.3)


def _limit(axes: Axes, drawn: Tensor) -> str:
    """Cut off a peak that would flatten everything else; return a note about it for the title.

    An example is film that is almost black. Without such a peak the note is empty.
    """
    axes.set_ylim(bottom=0)
    usual, most = drawn.quantile(0.97).item(), drawn.max().item()
    if most <= _CUT * usual or not usual:
        return ""
    axes.set_ylim(0, 1.5 * usual)
    return f" (peaks up to {most:.0f} are cut off)"


def _label(silo: Silo, split: str) -> str:
    """Return a site's name, its distribution if that has another name, and its number of images."""
    count = f"{len(silo.splits()[split])} images"
    if silo.distribution == silo.name:
        return f"{silo.name} ({count})"
    return f"{silo.name} ({silo.distribution}, {count})"
