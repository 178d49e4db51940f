"""``fedsilo embeddings``: what runs make of all sites' samples, as t-SNE and as two numbers.

t-SNE (van der Maaten and Hinton 2008) as the Fed-Align-CL paper's figures 4 and 6. How far a site
can be told from the embeddings measures the domain shift that is left in them, how far the class
can, what they are good for. It runs where the data lie; nothing is sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from client_app.explain.embeddings import embed
from models.contract.errors import DataError, SettingError
from models.contract.seeding import generator
from server_app.figures.explain import finished_settings
from server_app.figures.learning_curves import write_picture
from server_app.figures.style import (
    colours,
    naming,
    opened,
    refuse_shared_state,
    run_title,
    sites_of,
)
from server_app.records.run_directory import RunDirectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FOLDS = 5
_LEAST = 4  # samples: of fewer there is no neighbourhood to keep
_MARKERS = "oxs^vDP*+<"  # of class 0, 1, ...

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Cloud:
    """The embeddings of a run's sites.

    Attributes:
        sites: names of the sites.
        classes: names of the classes.
        site: (n,) each sample's site, by number.
        row: (n,) its row in the site's split.
        label: (n,) its class.
        values: (n, c) its embedding.
        own_models: whether sites embed with models of their own, whose axes have nothing in common.
    """

    sites: list[str]
    classes: list[str]
    site: Array
    row: Array
    label: Array
    values: Array
    own_models: bool


@dataclass(frozen=True)
class _Part:
    """A site's share of a cloud; ``probed`` is what its model makes of the first site's sample."""

    rows: Tensor
    labels: Tensor
    values: Tensor
    probed: Tensor


@dataclass(frozen=True)
class Panel:
    """A cloud on the plane: a run's title, the points (n, 2), and ``separability``."""

    title: str
    cloud: Cloud
    points: Array
    numbers: dict[str, float | None]


def embeddings(options: argparse.Namespace) -> None:
    """Draw the embeddings of one or several runs; write each run's ``embeddings.json``.

    Raises:
        FedsiloError: a run has not ended, mixes several networks, or holds too few samples.
    """
    if options.limit is not None and options.limit < 1:
        raise SettingError(f"--limit is {options.limit}; it must be at least 1")
    # Before anything is computed: have all the runs ended?
    titles = [run_title(run, finished_settings(run, options.data_dir)) for run in options.run_dirs]
    panels = []
    for run_dir, title in zip(options.run_dirs, titles, strict=True):
        with naming(run_dir):
            cloud = gather(run_dir, options)
            points = on_plane(cloud.values, options.seed)
        panels.append(Panel(title, cloud, points, separability(cloud, options.seed)))
    for run_dir, panel in zip(options.run_dirs, panels, strict=True):
        facts = {"split": options.split, "layer": options.layer, "seed": options.seed}
        RunDirectory(run_dir).write_json("embeddings.json", document(panel, facts))
        print(run_dir / "embeddings.json", *told(panel).splitlines(), sep="\n  ")
    path: Path = options.picture or options.run_dirs[0] / "embeddings.png"
    write_picture(path, draw_panels(panels, f"{options.split} samples, {options.layer} layer"))
    print(path)


def gather(run_dir: Path, options: argparse.Namespace) -> Cloud:
    """Return the embeddings of a run's sites, each by the model that the site has.

    Raises:
        FedsiloError: the run has not ended, or its model mixes several networks.
    """
    sites = sites_of(run_dir, options.site)
    refuse_shared_state(options.state_dir, options.run_dirs, len(sites))
    parts: dict[str, _Part] = {}
    probe: Tensor | None = None
    for site in sites:
        method, network = opened(run_dir, site, options.data_dir, options.state_dir)
        split = method.silo.splits()[options.split]
        if not len(split):
            print(f"site {site} has no {options.split} samples")
            continue
        chosen = _chosen(len(split), options.limit, options.seed, site)
        probe = split.inputs[:1] if probe is None else probe
        found, probed = (
            embed(network, inputs, method.compute, options.layer)
            for inputs in (split.inputs[chosen], probe)
        )
        if not found.isfinite().all():
            raise DataError(f"the embeddings of site {site} are not finite: its training diverged")
        parts[site] = _Part(chosen, split.labels[chosen], found, probed)
    if not parts:
        raise DataError(f"no site has {options.split} samples: choose another --split")
    return _joined(parts, list(method.silo.class_names()))


def _joined(parts: Mapping[str, _Part], classes: list[str]) -> Cloud:
    probed = [part.probed for part in parts.values()]
    return Cloud(
        sites=list(parts),
        classes=classes,
        site=np.repeat(np.arange(len(parts)), [len(part.rows) for part in parts.values()]),
        row=torch.cat([part.rows for part in parts.values()]).numpy(),
        label=torch.cat([part.labels for part in parts.values()]).numpy(),
        values=torch.cat([part.values for part in parts.values()]).numpy(),
        # Models that embed one and the same sample otherwise are not one model
        own_models=not all(torch.allclose(probed[0], other, atol=1e-5) for other in probed),
    )


def _chosen(count: int, limit: int | None, seed: int, site: str) -> Tensor:
    """Return the rows to embed, in order: all, or ``limit`` of them, the same of every run."""
    if limit is None or limit >= count:
        return torch.arange(count)
    draw = generator(seed, "embeddings", site)
    return torch.randperm(count, generator=draw)[:limit].sort().values


def on_plane(values: Array, seed: int) -> Array:
    """Return the t-SNE (n, 2) of embeddings (n, c), perplexity min(30, (n - 1) / 3).

    Raises:
        DataError: there are fewer than four.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    count = len(values)
    if count < _LEAST:
        raise DataError(f"t-SNE needs at least {_LEAST} samples, and there are {count}")
    # Principal components cannot start what has one dimension, or where all samples are alike
    starts = values.shape[1] > 1 and values.std(axis=0).max() > 0
    with threadpool_limits(1):  # sums of several threads would move points from run to run
        planner = TSNE(
            perplexity=min(30.0, (count - 1) / 3),
            init="pca" if starts else "random",
            random_state=seed,
        )
        return np.asarray(planner.fit_transform(values))


def separability(cloud: Cloud, seed: int) -> dict[str, float | None]:
    """Return how well site and class can be told from the embeddings, by five-fold validation.

    A logistic regression on standardised embeddings: ``site accuracy`` beside ``largest site``, the
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


def document(panel: Panel, facts: dict[str, Any]) -> dict[str, Any]:
    """Return embeddings.json: ``facts``, the numbers, and a point per sample."""
    cloud = panel.cloud
    columns = zip(cloud.site, cloud.row, cloud.label, panel.points, strict=True)
    return {
        **facts,
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


def told(panel: Panel) -> str:
    """Return the numbers in two lines of text, with a third where each site has its own model."""
    site, largest, auc = panel.numbers.values()
    lines = [
        "site: too few samples or sites to tell"
        if site is None
        else f"site told from embedding: {site:.2f} (largest site {largest:.2f})",
        "class: too few samples or classes to tell"
        if auc is None
        else f"class told from embedding: AUC {auc:.2f}",
    ]
    if panel.cloud.own_models:
        lines.append("a model per site: they differ by model, too")
    return "\n".join(lines)


def draw_panels(panels: Sequence[Panel], title: str) -> Figure:
    """Return the picture: axes per run, a colour per site, a marker per class."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns + 0.4, 5.0 * rows + 0.9), layout="constrained")
    axes_of = figure.subplots(rows, columns, squeeze=False).flatten()
    sites = list(dict.fromkeys(site for panel in panels for site in panel.cloud.sites))
    classes = max((panel.cloud.classes for panel in panels), key=len)
    shades = colours(sites)
    for axes in axes_of:
        axes.set_axis_off()
    for axes, panel in zip(axes_of, panels, strict=False):
        _draw_panel(axes, panel, [shades[site] for site in panel.cloud.sites])
    handles = [Line2D([], [], color=shades[site], marker="o", ls="", label=site) for site in sites]
    handles += [
        Line2D([], [], color="black", marker=_marker(label), ls="", label=_class(name))
        for label, name in enumerate(classes)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4 * columns, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_panel(axes: Axes, panel: Panel, shades: Sequence[Any]) -> None:
    cloud = panel.cloud
    axes.set_axis_on()
    # In a random order: else the last site would lie over all others
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
    axes.set_xlabel(told(panel), fontsize="small")


def _marker(label: int) -> str:
    return _MARKERS[label % len(_MARKERS)]


def _class(name: str) -> str:
    return f"class {name}" if name.isdecimal() else name
