"""``fedsilo embeddings``: shows the embeddings of all sites' samples by t-SNE and two numbers.

t-SNE (van der Maaten and Hinton 2008) is used as in figures 4 and 6 of the Fed-Align-CL paper. If
the site can be predicted from the embeddings, they still contain domain shift. If the class can be
predicted, the embeddings are useful. All of this runs on the machine with the data; nothing is
sent.
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
_FEWEST = 4  # samples; with fewer, t-SNE lacks neighbourhoods to preserve
_MARKERS = "oxs^vDP*+<"  # markers of class 0, 1, ...

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Cloud:
    """The embeddings of the samples of all sites of a run."""

    sites: list[str]  # names of the sites that have samples
    classes: list[str]  # names of the classes
    site: Array  # (n,) index of each sample's site in ``sites``
    row: Array  # (n,) row of each sample in the site's split
    label: Array  # (n,) true class of each sample
    values: Array  # (n, c) embedding of each sample
    own_models: bool  # whether sites have different models, so that axes mean different things


@dataclass(frozen=True)
class Selection:
    """The samples to embed, and the layer that embeds them."""

    sites: Sequence[str]  # names of sites; empty for all sites of a run
    split: str  # 'train', 'val' or 'test'
    layer: str  # the network's layer, one of ``LAYERS``
    limit: int | None  # largest number of samples per site; None for all
    seed: int  # seed for the choice of samples, for t-SNE and for the folds


@dataclass(frozen=True)
class Panel:
    """One run's panel of the picture: its embeddings as points on the plane."""

    title: str
    cloud: Cloud
    points: Array  # (n, 2) coordinates by t-SNE
    numbers: dict[str, float | None]  # the result of ``measure_separability``

    def lines(self) -> list[str]:
        """Format how well the embeddings predict a sample's site and class, as lines of text.

        The first line gives the accuracy of predicting the site, next to the share of samples from
        the largest site. The second line gives the AUC of predicting the class. If a number is
        missing, its line gives the reason. A third line warns if the sites have different models.
        """
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
    """Compute the embeddings of a run's samples, and their points on the plane by t-SNE.

    An embedding is the output of one layer of the network. Each site's own model computes the
    embeddings of that site's samples. The panel also has the result of ``measure_separability`` on
    the embeddings.

    Args:
        run: the finished run.
        selection: the sites, the samples of each site, the layer and the seed.
        data_dir: the data directory; None for the directory that the run used.
        state_dir: the folder with the site's private state, allowed only for a single site. None
            for the folder in the run directory.
        tell: is called with a line of text for each site without samples in the split.

    Raises:
        FedsiloError: a site is unknown, ``state_dir`` is given for several sites, a model consists
            of several networks, or there are fewer than four samples. The error names the run
            directory.
    """
    with naming(run.path):
        names = run.chosen_sites(selection.sites)
        refuse_shared_state(state_dir, [run.path], len(names))
        sites = _open_sites(run, names, selection, data_dir, state_dir)
        cloud = gather(sites, selection, tell)
        points = project_to_plane(cloud.values, selection.seed)
    # Numbers are computed in the network's dimensions: t-SNE's plane would exaggerate clusters
    return Panel(run_title(run), cloud, points, measure_separability(cloud, selection.seed))


def _open_sites(
    run: FinishedRun,
    names: Sequence[str],
    selection: Selection,
    data_dir: Path | None,
    state_dir: Path | None,
) -> Iterator[tuple[Lab, SiteNetwork]]:
    """Open each site's data and network one after another, in the order of ``names``.

    Args:
        run: the finished run.
        names: the names of the sites.
        selection: its ``split`` tells which samples will be read.
        data_dir: the data directory; None for the directory that the run used.
        state_dir: the folder with the site's private state; None for the folder in the run
            directory.

    Yields:
        The data (as a ``Lab``) and the network of a site. A site is opened only when it is
        requested, so only one is in memory at a time.
    """
    for name in names:
        lab = run.lab(name, data_dir, state_dir, split=selection.split)
        yield lab, lab.open()


def gather(
    sites: Iterable[tuple[Lab, SiteNetwork]],
    selection: Selection,
    tell: Callable[[str], None],
) -> Cloud:
    """Compute the embeddings of each site's samples with its network, and join all sites.

    To find out whether the sites share one model, all networks also embed one common sample. If two
    of these embeddings differ by more than rounding, ``own_models`` of the result is True.

    Args:
        sites: the data and the network of each site, which are opened one after another.
        selection: the samples and the layer.
        tell: is called with a line of text for each site without samples in the split. Such a site
            is left out.

    Raises:
        FedsiloError: a site cannot be opened, a model consists of several networks, embeddings are
            not finite because training diverged, or no site has samples.
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
        # All networks embed the first sample of the first site. If the results differ, the sites
        # have different models
        if probe is None:
            probe = split.inputs[:1]
        probed.append(embed(network, probe, lab.compute, selection.layer))
    if not names:
        raise DataError(f"no site has {selection.split} samples: choose another --split")
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
    """Choose which of a site's ``count`` samples are embedded.

    If ``limit`` is None or at least ``count``, all rows are chosen. Otherwise ``limit`` rows are
    chosen at random. Equal arguments give equal rows, so all runs show the same samples of a site.

    Returns:
        The row numbers, int64, ascending.
    """
    if limit is None or limit >= count:
        return torch.arange(count)
    rng = generator(seed, "embeddings", site)
    return torch.randperm(count, generator=rng)[:limit].sort().values


def project_to_plane(values: Array, seed: int) -> Array:
    """Map embeddings (n, c) to points (n, 2) by t-SNE with perplexity min(30, (n - 1) / 3).

    Equal embeddings and seeds give equal points.

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


def measure_separability(cloud: Cloud, seed: int) -> dict[str, float | None]:
    """Measure how well embeddings predict a sample's site and class, by 5-fold cross-validation.

    The predictor is a logistic regression on standardised embeddings. The prediction of sites
    leaves out sites with fewer than five samples. The prediction of classes leaves out such
    classes.

    Returns:
        Three numbers from 0 to 1:

        - ``site accuracy``: the accuracy of predicting the site.
        - ``largest site``: the accuracy of always guessing the site with the most samples.
        - ``label AUC``: the AUC of predicting the class. For more than two classes, it is the mean
          AUC of each class against the rest.

        The first two are None if fewer than two sites remain. The last is None if fewer than two
        classes remain.
    """
    # Predicting the site shows domain shift (lower is better), predicting the class shows that the
    # embeddings are useful (higher is better)
    numbers: dict[str, float | None] = dict.fromkeys(("site accuracy", "largest site", "label AUC"))
    kept = _mark_frequent(cloud.site)
    if kept.any():
        numbers["site accuracy"] = _cross_validate(
            cloud.values[kept], cloud.site[kept], "accuracy", seed
        )
        numbers["largest site"] = float(np.bincount(cloud.site[kept]).max() / kept.sum())
    kept = _mark_frequent(cloud.label)
    if kept.any():
        scoring = "roc_auc" if len(np.unique(cloud.label[kept])) == 2 else "roc_auc_ovr"
        numbers["label AUC"] = _cross_validate(cloud.values[kept], cloud.label[kept], scoring, seed)
    return numbers


def _mark_frequent(targets: Array) -> Array:
    """Mark the samples whose target (site or class) occurs often enough to be predicted.

    Cross-validation in five folds needs five samples with the same target, one for each fold. If
    fewer than two different targets occur that often, no sample is marked, because then there is
    nothing to predict.

    Args:
        targets: (n,), the number of each sample's site or class.

    Returns:
        bool (n,).
    """
    # Every fold must have a sample of each target. bincount is (targets,), enough[targets] is (n,)
    enough = np.bincount(targets) >= _FOLDS
    return np.asarray(enough[targets] & (enough.sum() > 1))


def _cross_validate(values: Array, targets: Array, scoring: str, seed: int) -> float:
    """Measure how well a logistic regression predicts ``targets`` (n,) from ``values`` (n, c).

    The result is the mean score over five folds, stratified by target and chosen with ``seed``.
    ``scoring`` is a scikit-learn score. Each model standardises the values by its training folds.
    """
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
    """Build the content of embeddings.json, which shows samples as points on the plane.

    The keys ``split``, ``layer``, ``seed``, ``own models``, ``dimensions`` and ``classes`` describe
    the run. The three numbers of ``measure_separability`` follow. ``points`` lists for each sample
    the site, the row in the split, the label, and the coordinates ``x`` and ``y`` with 4 decimals.
    Embeddings are not included.
    """
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
    """Draw the panels of several runs side by side, with one legend for all.

    All panels use the same colour for a site and the same marker for a class. The legend lists the
    sites of all runs. A row has at most three panels, but four panels are drawn as two rows of two.
    """
    from matplotlib.lines import Line2D

    # Four panels look better in two rows of two than in rows of three and one
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
    """Draw the samples of one run as points.

    The colour of a point shows its site, and the marker shows its class. The points of each class
    are drawn in a random order with a fixed seed, so that no site hides the other sites. The text
    below the points is ``Panel.lines``, which tells how well the embeddings predict site and class.

    Args:
        axes: the empty axes to draw on.
        panel: the points and their texts.
        shades: the colour of each site, in the order of the panel's sites.
    """
    cloud = panel.cloud
    # The points are drawn in random order, because the last site would hide the others
    order = np.random.default_rng(0).permutation(len(panel.points))
    for label in range(len(cloud.classes)):
        chosen = order[cloud.label[order] == label]
        line_width = 0.0
        if _marker(label) in "x+":  # these markers are only lines, without area
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
