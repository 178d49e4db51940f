"""``fedsilo histograms``: draws the brightness of each site's images, as stored and as seen.

The picture follows figure 1 (right) of the Fed-Align-CL paper. It is computed on the machine with
the images, and only the picture leaves the site. Background pixels are left out, because their
number varies more than the brightness of tissue does. Background is every pixel that equals the
smallest value of its image, as padding does.
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

# Pixels as the silo stores them, or as the network receives them
Form = Literal["stored", "seen"]

_BINS = 64
_MARKED = 8  # bins from one marker of a line to the next
_TAIL = 0.0005  # share of the pixels at either end that a picture leaves out
_CUT = 2.5  # peaks above this multiple of the 97 % quantile of all densities are cut off
# Scale and offset that bring stored pixels to 0..1
_SCALES = {torch.uint8: (255.0, 0.0), torch.int16: (65535.0, 32768.0)}


@dataclass(frozen=True)
class Histograms:
    """The distribution of each site's pixels over common bins."""

    edges: Tensor  # (bins + 1,) edges of the bins, equally spaced
    densities: dict[str, Tensor]  # site -> (bins,); times the width of a bin they sum to 1


@dataclass(frozen=True)
class SiteHistograms:
    """The histograms of a run's sites, as they are drawn."""

    title: str  # names the data set and the split
    stored: Histograms  # histograms of the stored pixels, scaled to 0..1
    seen: Histograms  # histograms of the network's inputs
    labels: dict[str, str]  # site -> its entry in the legend


def open_silos(
    run: FinishedRun, common: CommonSettings, sites: Sequence[str], split: str
) -> dict[str, Silo]:
    """Load the data of some sites of a run, for histograms of their pixels.

    Args:
        run: the finished run.
        common: the run's settings, with the data directory of this machine.
        sites: the names of the sites.
        split: the split that will be read. Only this split is compared with the samples of the run.

    Returns:
        The name of each site with its data (silo), in the order of ``sites``.

    Raises:
        SettingError: the data set is a table.
        DataError: the samples of the split have changed since the run.
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
    """Compute two histograms of the pixels of each site: as stored, and as network inputs.

    Sites without images in the split are left out. The result also has the title of the picture,
    and the label of each site for the legend.

    Args:
        dataset: the name of the data set, for the title.
        silos: the name of each site with its data.
        split: 'train', 'val' or 'test'.

    Raises:
        DataError: no site has images in the split, or every image has only one pixel value. The
            smallest value of an image counts as background.
    """
    splits, labels = {}, {}
    for site, silo in silos.items():
        if len(silo.splits()[split]):
            splits[site] = silo.splits()[split]
            labels[site] = _label(silo, split)
    stored, seen = measure_pixels(splits)
    return SiteHistograms(f"{split} images of {dataset}", stored, seen, labels)


def measure_pixels(splits: Mapping[str, Split]) -> tuple[Histograms, Histograms]:
    """Compute the histograms of the stored pixels, and of the same pixels as network inputs.

    Stored integers are scaled to [0, 1], and floats are kept. Pixels with the smallest value of
    their image are background, and are left out. All bins of a histogram have the same width. If
    the distance between grey levels is known, there are at most 64 bins, and each covers the same
    number of levels. Otherwise, there are 64 bins. The distance is known in these cases:

    - Stored pixels, if all sites store integers: 1 / 255, or 1 / 65535 if a site stores int16.
    - Network inputs, if all sites store 8-bit pixels: 2 / 255, because inputs are in [-1, 1].

    Args:
        splits: site -> its images.

    Returns:
        The histograms of the stored pixels, then those of the network's inputs.

    Raises:
        DataError: ``splits`` is empty, or all images show only background.
    """
    kinds = {split.inputs.dtype for split in splits.values()}
    if not kinds:
        raise DataError("no site has images of that split: choose another --split")
    # The distance between neighbouring pixel values; 0 for standardised images, which are floats.
    # If sites store different types, the finest step is taken
    stored_step = seen_step = 0.0
    if kinds <= _SCALES.keys():
        stored_step = 1 / max(_SCALES[kind][0] for kind in kinds)
    # 8-bit inputs are in [-1, 1], 2 / 255 apart; int16 images are standardised one by one
    if kinds == {torch.uint8}:
        seen_step = 2 / 255
    return _measure(splits, "stored", stored_step), _measure(splits, "seen", seen_step)


def _measure(splits: Mapping[str, Split], form: Form, step: float) -> Histograms:
    """Compute the histogram of each site's pixels in one form; ``step`` is passed to ``_edges``."""
    edges = _edges(splits, form, step)
    densities = {site: _density(split, form, edges) for site, split in splits.items()}
    return Histograms(edges, densities)


def _foreground(split: Split, form: Form) -> Iterator[Tensor]:
    """Yield the pixels of a split without the background, for one batch of images at a time.

    Background is every pixel whose stored value is the smallest of its image, over all channels. A
    batch that has only background yields nothing.

    Args:
        split: the images.
        form: "stored" for stored pixels, with integers scaled to [0, 1]. "seen" for network inputs.

    Yields:
        float32 (n,), the pixels of a batch.
    """
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
    """Choose the edges of the histograms, which are the same for all sites.

    The bins have equal widths, and cover all pixels of all sites without the background. Continuous
    pixels get 64 bins. Other pixels get at most 64 bins, each for the same number of grey levels.

    Args:
        splits: site -> its images.
        form: "stored" for stored pixels, "seen" for network inputs.
        step: the distance between two neighbouring grey levels; 0 for continuous pixels.

    Returns:
        The edges, float64 (bins + 1,).

    Raises:
        DataError: all images show only background.
    """
    low, high = math.inf, -math.inf
    for split in splits.values():
        for pixels in _foreground(split, form):
            low = min(low, pixels.min().item())
            high = max(high, pixels.max().item())
    if low > high:
        raise DataError("each image has only one value, which counts as background: choose others")
    if step:
        # Edges lie half a step below a level, so that rounding cannot move a pixel to another bin
        levels = round((high - low) / step) + 1
        per_bin = max(1, math.ceil(levels / _BINS))
        bins = math.ceil(levels / per_bin)
        return low + step * (per_bin * torch.arange(bins + 1, dtype=torch.float64) - 0.5)
    # histc ignores pixels outside the edges, and rounding must not move the darkest one there
    margin = max((high - low) * 1e-6, 1e-6)
    return torch.linspace(low - margin, high + margin, _BINS + 1, dtype=torch.float64)


def _density(split: Split, form: Form, edges: Tensor) -> Tensor:
    """Compute the histogram of a site's pixels as a density, float64 (bins,).

    Background pixels are left out. The area under the density is 1. If a site's images show only
    background, the density is 0 everywhere.

    Args:
        split: the site's images.
        form: "stored" for stored pixels, "seen" for network inputs.
        edges: the edges of the bins, float64 (bins + 1,), all of the same width.
    """
    bins, low, high = len(edges) - 1, edges[0].item(), edges[-1].item()
    # float64, because float32 counts exactly only up to 2^24 pixels
    counts = torch.zeros(bins, dtype=torch.float64)
    for pixels in _foreground(split, form):
        counts += torch.histc(pixels, bins, low, high).double()
    return counts / counts.sum().clamp_min(1) / (edges[1] - edges[0])


def draw_histograms(measured: SiteHistograms) -> Figure:
    """Draw the histograms of all sites in two panels, with a line for each site.

    The left panel shows the histograms of the stored pixels. The right panel shows those of the
    network's inputs. Background is left out of both panels. The legend below the panels gives the
    number of images of each site.
    """
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
    """Draw the density of each site's pixels as a line.

    The horizontal axis does not show the lowest and the highest 0.05 % of the pixels of all sites.
    The vertical axis may cut off a few high peaks. ``title`` then gets a note about them.
    """
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
    inside |= ~inside.any()  # the whole axis if a single bin has all pixels
    shown = centres[inside]
    axes.set_xlim(shown[0].item(), shown[-1].item())
    axes.set_title(title + _limit_axis(axes, densities[:, inside].flatten()), fontsize="medium")
    axes.set_ylabel("density of pixels")
    axes.grid(alpha=0.3)


def _limit_axis(axes: Axes, drawn: Tensor) -> str:
    """Limit the vertical axis if a few high peaks would flatten the rest, and return a note.

    If the highest of the densities ``drawn`` exceeds 2.5 times their 97 % quantile, the axis ends
    at 1.5 times that quantile. The note says how high the peaks are, and belongs in the panel's
    title. If nothing is cut off, or if the quantile is 0, the note is empty.
    """
    axes.set_ylim(bottom=0)
    usual, most = drawn.quantile(0.97).item(), drawn.max().item()
    if most <= _CUT * usual or not usual:
        return ""
    axes.set_ylim(0, 1.5 * usual)
    return f" (peaks up to {most:.0f} are cut off)"


def _label(silo: Silo, split: str) -> str:
    """Format a site's entry in the legend: its name and its number of images in the split.

    The origin of the site's data (``distribution``) is added if it differs from the site's name.
    """
    count = f"{len(silo.splits()[split])} images"
    if silo.distribution == silo.name:
        return f"{silo.name} ({count})"
    return f"{silo.name} ({silo.distribution}, {count})"
