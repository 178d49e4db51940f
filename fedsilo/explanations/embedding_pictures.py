"""``fedsilo embeddings``: shows the embeddings of all sites' samples by t-SNE and two numbers.

t-SNE (van der Maaten and Hinton 2008) is used as in figures 4 and 6 of the Fed-Align-CL paper. If
the site can be predicted from embeddings, they still contain domain shift; if the class can be
predicted, they are useful. It runs on the machine that has the data; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.core.drawing.palette import GREY, colours
from fedsilo.core.errors import DataError
from fedsilo.core.seeding import generator
from fedsilo.explanations.embeddings import embed
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.pictures.panel_grids import (
    naming,
    panel_grid,
    refuse_shared_state,
    run_title,
)
from fedsilo.runs.finished_run import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FOLDS = 5
_FEWEST = 4  # samples; t-SNE of fewer has no neighbourhoods to preserve
_MARKERS = "oxs^vDP*+<"  # markers of class 0, 1, ...

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Cloud:
    """The embeddings of a run's sites."""

    sites: list[str]
    classes: list[str]
    site: Array  # (n,) index of each sample's site in ``sites``
    row: Array  # (n,) row of each sample in the site's split
    label: Array  # (n,) class of each sample
    values: Array  # (n, c) embedding of each sample
    own_models: bool  # whether each site has its own model; then the axes are not comparable


@dataclass(frozen=True)
class Selection:
    """The samples to embed, and the layer that embeds them."""

    sites: Sequence[str]  # empty for all sites of a run
    split: str  # train, val or test
    layer: str  # the network's layer, one of ``LAYERS``
    limit: int | None  # samples per site; None for all
    seed: int  # seed for the choice of samples, for t-SNE and for the folds


@dataclass(frozen=True)
class Panel:
    """A cloud drawn on the plane: title, points of shape (n, 2), numbers of ``separability``."""

    title: str
    cloud: Cloud
    points: Array
    numbers: dict[str, float | None]

    def lines(self) -> list[str]:
        """Return the numbers in two lines, with a third line if each site has its own model."""
        lines = ["site: too few samples or sites", "class: too few samples or classes"]
        accuracy, largest = self.numbers["site accuracy"], self.numbers["largest site"]
        if accuracy is not None:
            lines[0] = f"site predicted from embedding: {accuracy:.2f} (largest site {largest:.2f})"
        auc = self.numbers["label AUC"]
        if auc is not None:
            lines[1] = f"class predicted from embedding: AUC {auc:.2f}"
        if self.cloud.own_models:
            lines.append("each site has its own model, so sites differ by model as well")
        return lines


def embed_run(
    run: FinishedRun,
    selection: Selection,
    data_dir: Path | None,
    state_dir: Path | None,
    tell: Callable[[str], None],
) -> Panel:
    """Embed the samples of a run's sites by the models of the sites.

    ``tell`` takes a line for each site without samples in the split.

    Raises:
        FedsiloError: a model mixes several networks, or there are too few samples. The error names
            the run directory, because a command may draw several runs.
    """
    with naming(run.path):
        names = run.chosen_sites(selection.sites)
        refuse_shared_state(state_dir, [run.path], len(names))
        sites = _open_sites(run, names, selection, data_dir, state_dir)
        cloud = gather(sites, selection, tell)
        points = on_plane(cloud.values, selection.seed)
    # Numbers are computed in the network's dimensions: t-SNE's plane would exaggerate clusters
    return Panel(run_title(run), cloud, points, separability(cloud, selection.seed))


def _open_sites(
    run: FinishedRun,
    names: Sequence[str],
    selection: Selection,
    data_dir: Path | None,
    state_dir: Path | None,
) -> Iterator[tuple[Lab, SiteNetwork]]:
    """Yield the lab and network of one site after another, so that one is in memory at a time."""
    for name in names:
        lab = run.lab(name, data_dir, state_dir, split=selection.split)
        yield lab, lab.open()


def gather(
    sites: Iterable[tuple[Lab, SiteNetwork]],
    selection: Selection,
    tell: Callable[[str], None],
) -> Cloud:
    """Embed the samples of each site by the site's network.

    Args:
        sites: the lab and network of each site; one is opened after another.
        selection: the samples and the layer.
        tell: takes a line for each site without samples in the split.

    Raises:
        FedsiloError: a run has not ended, its model mixes several networks, or no site has samples.
    """
    names: list[str] = []
    classes: list[str] = []
    site_of, rows_of, labels_of, values_of = [], [], [], []
    probe: Tensor | None = None
    probed: list[Tensor] = []
    for lab, network in sites:
        site, split = lab.silo.name, lab.silo.splits()[selection.split]
        classes = list(lab.silo.class_names())
        if not len(split):
            tell(f"site {site} has no {selection.split} samples")
            continue
        rows = _choose_rows(len(split), selection.limit, selection.seed, site)
        values = embed(network, split.inputs[rows], lab.compute, selection.layer)
        if not values.isfinite().all():
            raise DataError(f"the embeddings of site {site} are not finite: its training diverged")
        site_of += [len(names)] * len(rows)
        names.append(site)
        rows_of.append(rows)
        labels_of.append(split.labels[rows])
        values_of.append(values)
        # All networks embed the same sample, which shows whether they are the same model
        if probe is None:
            probe = split.inputs[:1]
        probed.append(embed(network, probe, lab.compute, selection.layer))
    if not names:
        raise DataError(f"no site has {selection.split} samples: choose another --split")
    # Networks that embed the same probe differently are different models
    is_shared = all(torch.allclose(probed[0], other, atol=1e-5) for other in probed)
    return Cloud(
        sites=names,
        classes=classes,
        site=np.array(site_of),
        row=torch.cat(rows_of).numpy(),
        label=torch.cat(labels_of).numpy(),
        values=torch.cat(values_of).numpy(),
        own_models=not is_shared,
    )


def _choose_rows(count: int, limit: int | None, seed: int, site: str) -> Tensor:
    """Choose the rows to embed, in order: all, or ``limit`` of them, the same in every run."""
    if limit is None or limit >= count:
        return torch.arange(count)
    rng = generator(seed, "embeddings", site)
    return torch.randperm(count, generator=rng)[:limit].sort().values


def on_plane(values: Array, seed: int) -> Array:
    """Compute the t-SNE (n, 2) of embeddings (n, c), with perplexity min(30, (n - 1) / 3).

    Raises:
        DataError: there are fewer than four embeddings.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    count = len(values)
    if count < _FEWEST:
        raise DataError(f"t-SNE needs at least {_FEWEST} samples, but there are only {count}")
    # Principal components do not exist for a single dimension, or if all samples are equal
    varied = values.shape[1] > 1 and values.std(axis=0).max() > 0
    with threadpool_limits(1):  # several threads would add in another order and move the points
        planner = TSNE(
            perplexity=min(30.0, (count - 1) / 3),
            init="pca" if varied else "random",
            random_state=seed,
        )
        return np.asarray(planner.fit_transform(values))


def separability(cloud: Cloud, seed: int) -> dict[str, float | None]:
    """Measure how well embeddings predict site and class, by five-fold cross-validation.

    The predictor is a logistic regression on standardised embeddings. Sites and classes with fewer
    than five samples are left out.

    Returns:
        ``site accuracy``; ``largest site``, the share of the site with the most samples; and
        ``label AUC``, for several classes the mean over each class against the rest. A number is
        None if fewer than two sites or classes remain.
    """
    numbers: dict[str, float | None] = dict.fromkeys(("site accuracy", "largest site", "label AUC"))
    kept = _frequent(cloud.site)
    if kept.any():
        numbers["site accuracy"] = _cross_validate(
            cloud.values[kept], cloud.site[kept], "accuracy", seed
        )
        numbers["largest site"] = float(np.bincount(cloud.site[kept]).max() / kept.sum())
    kept = _frequent(cloud.label)
    if kept.any():
        scoring = "roc_auc" if len(np.unique(cloud.label[kept])) == 2 else "roc_auc_ovr"
        numbers["label AUC"] = _cross_validate(cloud.values[kept], cloud.label[kept], scoring, seed)
    return numbers


def _frequent(targets: Array) -> Array:
    """Mark the samples (n,) whose target has at least five; none if only one target has."""
    enough = np.bincount(targets) >= _FOLDS
    return np.asarray(enough[targets] & (enough.sum() > 1))


def _cross_validate(values: Array, targets: Array, scoring: str, seed: int) -> float:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=seed)
    with threadpool_limits(1):  # several threads would change the last digits
        return float(cross_val_score(model, values, targets, cv=folds, scoring=scoring).mean())


def document(panel: Panel, selection: Selection) -> dict[str, Any]:
    """Build embeddings.json: the selection, the numbers, and a point per sample."""
    cloud = panel.cloud
    points = []
    for index, (x, y) in enumerate(panel.points):
        point = {
            "site": cloud.sites[cloud.site[index]],
            "row": int(cloud.row[index]),
            "label": int(cloud.label[index]),
            "x": round(float(x), 4),
            "y": round(float(y), 4),
        }
        points.append(point)
    return {
        "split": selection.split,
        "layer": selection.layer,
        "seed": selection.seed,
        "own models": cloud.own_models,
        "dimensions": cloud.values.shape[1],
        **panel.numbers,
        "classes": cloud.classes,
        "points": points,
    }


def draw_panels(panels: Sequence[Panel], title: str) -> Figure:
    """Draw the panels: axes for each run, a colour for each site, a marker for each class."""
    from matplotlib.lines import Line2D

    columns = min(3, len(panels))
    if len(panels) == 4:
        columns = 2
    figure, axes_of = panel_grid(len(panels), columns, (4.4, 5.0), (0.4, 0.9))
    sites: dict[str, None] = {}
    for panel in panels:
        sites |= dict.fromkeys(panel.cloud.sites)
    colour_of = colours(list(sites))
    for axes, panel in zip(axes_of, panels, strict=True):
        _draw_panel(axes, panel, [colour_of[site] for site in panel.cloud.sites])
    handles = []
    for site in sites:
        handles.append(Line2D([], [], color=colour_of[site], marker="o", ls="", label=site))
    classes = max((panel.cloud.classes for panel in panels), key=len)
    for label, name in enumerate(classes):
        text = f"class {name}" if name.isdecimal() else name
        handles.append(Line2D([], [], color=GREY, marker=_marker(label), ls="", label=text))
    figure.legend(handles=handles, loc="outside lower center", ncols=4 * columns, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_panel(axes: Axes, panel: Panel, shades: Sequence[Any]) -> None:
    cloud = panel.cloud
    # The points are drawn in random order, because the last site would hide the others
    order = np.random.default_rng(0).permutation(len(panel.points))
    for label in range(len(cloud.classes)):
        chosen = order[cloud.label[order] == label]
        line_width = 0.0
        if _marker(label) in "x+":  # these markers have no area, only lines
            line_width = 1.0
        axes.scatter(
            panel.points[chosen, 0],
            panel.points[chosen, 1],
            c=[shades[site] for site in cloud.site[chosen]],
            marker=_marker(label),
            s=22,
            alpha=0.75,
            linewidths=line_width,
        )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(panel.title, fontsize="small")
    axes.set_xlabel("\n".join(panel.lines()), fontsize="small")


def _marker(label: int) -> str:
    return _MARKERS[label % len(_MARKERS)]
