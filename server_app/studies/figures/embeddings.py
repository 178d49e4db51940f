"""``fedsilo embeddings``: runs' embeddings of all sites' samples, as t-SNE and as two numbers.

t-SNE (van der Maaten and Hinton 2008) as the Fed-Align-CL paper's figures 4 and 6. How well
the site can be predicted from the embeddings measures the domain shift that is left in them, and
how well the class can, their use. It runs where the data are; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsilo.client_app.explain.embeddings import EMBEDDING, embed
from fedsilo.client_app.lab import Lab
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.seeding import generator
from fedsilo.models.figures.palette import GREY, colours
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.server_app.studies.figures.panels import panel_grid, run_title
from fedsilo.server_app.studies.finished_site import (
    finished_settings,
    naming,
    opened,
    refuse_shared_state,
    sites_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FOLDS = 5
_FEWEST = 4  # samples: of fewer there is no neighbourhood to keep
_MARKERS = "oxs^vDP*+<"  # of class 0, 1, ...

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Cloud:
    """The embeddings of a run's sites."""

    sites: list[str]
    classes: list[str]
    site: Array  # (n,) each sample's site, by number
    row: Array  # (n,) its row in the site's split
    label: Array  # (n,) its class
    values: Array  # (n, c) its embedding
    own_models: bool  # whether sites embed with models of their own: axes have nothing in common


@dataclass(frozen=True)
class Selection:
    """Which samples are embedded, and by what."""

    sites: Sequence[str] = ()  # none for all of a run
    split: str = "test"
    layer: str = EMBEDDING  # of the network, one of ``LAYERS``
    limit: int | None = None  # samples per site, or None for all
    seed: int = 0  # of the choice up to the limit, of t-SNE and of the folds


@dataclass(frozen=True)
class Panel:
    """A cloud on the plane: a run's title, the points (n, 2), and ``separability``."""

    title: str
    cloud: Cloud
    points: Array
    numbers: dict[str, float | None]

    def lines(self) -> list[str]:
        """Return the numbers in two lines, with a third where each site has its own model."""
        site, largest, auc = self.numbers.values()
        lines = [
            "site: too few samples or sites"
            if site is None
            else f"site predicted from embedding: {site:.2f} (largest site {largest:.2f})",
            "class: too few samples or classes"
            if auc is None
            else f"class predicted from embedding: AUC {auc:.2f}",
        ]
        if self.cloud.own_models:
            lines.append("a model per site: they differ by model as well")
        return lines


def embeddings(
    run_dirs: Sequence[Path],
    selection: Selection,
    data_dir: Path | None = None,
    state_dir: Path | None = None,
    tell: Callable[[str], None] = print,
) -> list[Panel]:
    """Return what the models of one or several runs make of all sites' samples, a panel per run.

    ``tell`` is called with a line for each site without samples of the split.

    Raises:
        FedsiloError: a run has not ended, mixes several networks, or holds too few samples.
    """
    # Before anything is computed: have all the runs ended?
    titles = [run_title(run, finished_settings(run, data_dir)) for run in run_dirs]
    panels = []
    for run_dir, title in zip(run_dirs, titles, strict=True):
        with naming(run_dir):
            sites = sites_of(run_dir, selection.sites)
            refuse_shared_state(state_dir, run_dirs, len(sites))
            opened_sites = (
                opened(run_dir, site, data_dir, state_dir, selection.split) for site in sites
            )
            cloud = gather(opened_sites, selection, tell)
            points = on_plane(cloud.values, selection.seed)
        panels.append(Panel(title, cloud, points, separability(cloud, selection.seed)))
    return panels


def gather(
    sites: Iterable[tuple[Lab, SiteNetwork]],
    selection: Selection,
    tell: Callable[[str], None],
) -> Cloud:
    """Return the embeddings of sites' samples, each by the network that the site has.

    Sites are opened one after the other; ``tell`` is that of ``embeddings``.

    Raises:
        FedsiloError: a run has not ended, or its model mixes several networks.
    """
    parts: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    classes: list[str] = []
    probe: Tensor | None = None
    probed: list[Tensor] = []
    for method, network in sites:
        site, split = method.silo.name, method.silo.splits()[selection.split]
        classes = list(method.silo.class_names())
        if not len(split):
            tell(f"site {site} has no {selection.split} samples")
            continue
        rows = _chosen(len(split), selection.limit, selection.seed, site)
        probe = split.inputs[:1] if probe is None else probe
        values, of_probe = (
            embed(network, inputs, method.compute, selection.layer)
            for inputs in (split.inputs[rows], probe)
        )
        if not values.isfinite().all():
            raise DataError(f"the embeddings of site {site} are not finite: its training diverged")
        parts[site] = rows, split.labels[rows], values
        probed.append(of_probe)
    if not parts:
        raise DataError(f"no site has {selection.split} samples: choose another --split")
    columns = zip(*parts.values(), strict=True)
    row, label, embedded = (torch.cat(column).numpy() for column in columns)
    site_of = np.repeat(np.arange(len(parts)), [len(rows) for rows, *_ in parts.values()])
    # Models that embed one sample differently are not one model
    own_models = not all(torch.allclose(probed[0], other, atol=1e-5) for other in probed)
    return Cloud(list(parts), classes, site_of, row, label, embedded, own_models)


def _chosen(count: int, limit: int | None, seed: int, site: str) -> Tensor:
    """Return the rows to embed, in order: all, or ``limit`` of them, the same of every run."""
    if limit is None or limit >= count:
        return torch.arange(count)
    rng = generator(seed, "embeddings", site)
    return torch.randperm(count, generator=rng)[:limit].sort().values


def on_plane(values: Array, seed: int) -> Array:
    """Return the t-SNE (n, 2) of embeddings (n, c), perplexity min(30, (n - 1) / 3).

    Raises:
        DataError: there are fewer than four.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    count = len(values)
    if count < _FEWEST:
        raise DataError(f"t-SNE needs at least {_FEWEST} samples, and there are {count}")
    # Principal components cannot start what has one dimension, or where all samples are alike
    varied = values.shape[1] > 1 and values.std(axis=0).max() > 0
    with threadpool_limits(1):  # sums of several threads would move points from run to run
        planner = TSNE(
            perplexity=min(30.0, (count - 1) / 3),
            init="pca" if varied else "random",
            random_state=seed,
        )
        return np.asarray(planner.fit_transform(values))


def separability(cloud: Cloud, seed: int) -> dict[str, float | None]:
    """Return how well embeddings predict site and class, by five-fold cross-validation.

    A logistic regression on standardised embeddings: ``site accuracy``, ``largest site``, the
    share of the site with most samples, and ``label AUC`` (of several classes the mean of each
    against the rest). Sites and classes of fewer than five samples are left out; where fewer than
    two are left the numbers are None.
    """
    numbers: dict[str, float | None] = dict.fromkeys(("site accuracy", "largest site", "label AUC"))
    kept = _frequent(cloud.site)
    if kept.any():
        numbers["site accuracy"] = _validated(
            cloud.values[kept], cloud.site[kept], "accuracy", seed
        )
        numbers["largest site"] = float(np.bincount(cloud.site[kept]).max() / kept.sum())
    kept = _frequent(cloud.label)
    if kept.any():
        scoring = "roc_auc" if len(np.unique(cloud.label[kept])) == 2 else "roc_auc_ovr"
        numbers["label AUC"] = _validated(cloud.values[kept], cloud.label[kept], scoring, seed)
    return numbers


def _frequent(targets: Array) -> Array:
    """Return (n,) which samples are of a target with enough of them; none if one target is left."""
    enough = np.bincount(targets) >= _FOLDS
    return np.asarray(enough[targets] & (enough.sum() > 1))


def _validated(values: Array, targets: Array, scoring: str, seed: int) -> float:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=seed)
    with threadpool_limits(1):
        return float(cross_val_score(model, values, targets, cv=folds, scoring=scoring).mean())


def document(panel: Panel, selection: Selection) -> dict[str, Any]:
    """Return embeddings.json: what was selected, the numbers, and a point per sample."""
    cloud = panel.cloud
    columns = zip(cloud.site, cloud.row, cloud.label, panel.points, strict=True)
    return {
        "split": selection.split,
        "layer": selection.layer,
        "seed": selection.seed,
        "own models": cloud.own_models,
        "dimensions": cloud.values.shape[1],
        **panel.numbers,
        "classes": cloud.classes,
        "points": [
            {
                "site": cloud.sites[site],
                "row": int(row),
                "label": int(label),
                "x": round(float(x), 4),
                "y": round(float(y), 4),
            }
            for site, row, label, (x, y) in columns
        ],
    }


def draw_panels(panels: Sequence[Panel], title: str) -> Figure:
    """Return the picture: axes per run, a colour per site, a marker per class."""
    from matplotlib.lines import Line2D

    columns = 2 if len(panels) == 4 else min(3, len(panels))
    figure, axes_of = panel_grid(len(panels), columns, (4.4, 5.0), (0.4, 0.9))
    sites = list(dict.fromkeys(site for panel in panels for site in panel.cloud.sites))
    classes = max((panel.cloud.classes for panel in panels), key=len)
    shades = colours(sites)
    for axes, panel in zip(axes_of, panels, strict=True):
        _draw_panel(axes, panel, [shades[site] for site in panel.cloud.sites])
    handles = [Line2D([], [], color=shades[site], marker="o", ls="", label=site) for site in sites]
    handles += [
        Line2D([], [], color=GREY, marker=_marker(label), ls="", label=name)
        for label, name in enumerate(f"class {n}" if n.isdecimal() else n for n in classes)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4 * columns, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_panel(axes: Axes, panel: Panel, shades: Sequence[Any]) -> None:
    cloud = panel.cloud
    # In random order, or the last site would hide the others
    order = np.random.default_rng(0).permutation(len(panel.points))
    for label in range(len(cloud.classes)):
        chosen = order[cloud.label[order] == label]
        axes.scatter(
            panel.points[chosen, 0],
            panel.points[chosen, 1],
            c=[shades[site] for site in cloud.site[chosen]],
            marker=_marker(label),
            s=22,
            alpha=0.75,
            linewidths=1.0 if _marker(label) in "x+" else 0.0,
        )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(panel.title, fontsize="small")
    axes.set_xlabel("\n".join(panel.lines()), fontsize="small")


def _marker(label: int) -> str:
    return _MARKERS[label % len(_MARKERS)]
