"""Writes the results of ``fedsilo finetune``: table, finetune.json, CSV files, model, overlays."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from fedsilo.comparison.tables import Spread, rich_table, spread_cell
from fedsilo.core.drawing.panels import without_frame
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.state_files import save_state
from fedsilo.explanations.image_explanation import draw_image
from fedsilo.finetuning.finetune_settings import used_settings
from fedsilo.finetuning.tasks import Segmentation, Study, TrainedSeed, predicted_masks
from fedsilo.finetuning.transfer import DistilReport, TransferReport
from fedsilo.models.measures.segmentation_metrics import image_dice, overlaps
from fedsilo.pictures.panel_grids import new_figure
from fedsilo.pictures.picture_files import write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table


@dataclass(frozen=True)
class StartResult:
    """The results of one starting point, which are a row of the table."""

    label: str  # the name of the starting point
    method: str  # the method of the run; empty if the starting point is not a run
    transfer: TransferReport | DistilReport | None  # None for a start from scratch
    trained: tuple[TrainedSeed, ...]  # one result per seed

    def row(self, metric: str) -> Spread | None:
        """Return statistics of a test metric over seeds, such as its mean and standard deviation.

        A seed lacks a metric that is undefined on the test images. Such seeds are left out. If all
        seeds lack the metric, the result is None.
        """
        values = []
        for trained in self.trained:
            if metric in trained.test:
                values.append(trained.test[metric])
        if not values:
            return None
        return Spread.of(tuple(values))

    def best(self, headline: str) -> TrainedSeed:
        """Return the result of the seed with the highest validation value of ``headline``.

        ``headline`` is a metric. If several seeds have the highest value, the first of them is
        chosen. A seed without the metric is chosen only if no seed has it.
        """
        return max(self.trained, key=lambda trained: trained.val.get(headline, -math.inf))


@dataclass(frozen=True)
class FinetuneResult:
    """The result of fine-tuning: the study, and the result of each starting point, in order."""

    study: Study
    starts: tuple[StartResult, ...]


def result_table(finetuned: FinetuneResult) -> Table:
    """Build the table of test metrics for a terminal.

    There is a row for each starting point, and a column for each of the task's main metrics. A cell
    shows the mean over the seeds that have the metric. If several seeds have it, the standard
    deviation follows. If no seed has the metric, the cell is empty.
    """
    study = finetuned.study
    over = "one seed"
    if study.seeds > 1:
        over = f"mean ± sd over {study.seeds} seeds"
    title = f"{study.downstream.network} on {study.settings.dataset}, test metrics, {over}"
    lines = [["weights", *study.downstream.shown]]
    for result in finetuned.starts:
        cells = [result.label]
        for metric in study.downstream.shown:
            row = result.row(metric)
            if row:
                cells.append(spread_cell(row))
            else:
                cells.append("")
        lines.append(cells)
    return rich_table(title, lines)


def write_results(folder: Path, study: Study, starts: Sequence[StartResult], images: int) -> None:
    """Write the files of the result into an existing folder.

    The files are:

    - finetune.json with all results except the learning curves
    - figures.csv with the test metrics
    - curves.csv with the learning curves
    - model.safetensors with the network of the first starting point, from the seed with the best
      validation value of the task's headline metric
    - for segmentation only, overlays.png with the predicted masks of up to ``images`` test images
    """
    content = json.dumps(document(study, starts), indent=2, allow_nan=False)
    write_atomically(folder / "finetune.json", content + "\n")
    write_atomically(folder / "figures.csv", metrics_csv(study, starts))
    write_atomically(folder / "curves.csv", curves_csv(starts))
    best = starts[0].best(study.downstream.headline)
    facts = {
        "task": study.downstream.name,
        "network": study.downstream.network,
        "weights": starts[0].label,
        "seed": best.seed,
        "settings": used_settings(study.settings, study.downstream.name),
    }
    arrays = {name: tensor.numpy() for name, tensor in best.arrays.items()}
    save_state(folder / "model.safetensors", arrays, facts)
    if isinstance(study.downstream, Segmentation):
        write_picture(folder / "overlays.png", _draw_predicted_masks(study, starts, images))


def _draw_predicted_masks(study: Study, starts: Sequence[StartResult], images: int) -> Figure:
    """Draw test images with their true masks and the masks predicted from each starting point.

    Up to ``images`` images are drawn, spread evenly over the sites. For each starting point, the
    network trained with the first seed, 0, is rebuilt from its stored arrays. The caption of an
    image is its site and its row among the site's test images.
    """
    rows = spread_rows(study.data.origin, images)
    test, predicted = study.data.test, {}
    for result in starts:
        network = study.compute.place(study.downstream.build(study.settings, study.data.shape))
        network.load_state_dict(result.trained[0].arrays)
        predicted[result.label] = predicted_masks(network, test.inputs[rows], study.compute)
    origin = study.data.origin
    names = []
    for row in rows:
        site = origin[row]
        # Pooled images are in site order, so the site's first row is where its own rows start
        names.append(f"{site}, test row {row - origin.index(site)}")
    title = f"{study.downstream.network} on {study.settings.dataset}, seed 0"
    return draw_overlays(test.inputs[rows], test.labels[rows], predicted, names, title)


def metrics_csv(study: Study, starts: Sequence[StartResult]) -> str:
    """Format the test metrics of all starting points as CSV; see ``metrics_table``."""
    return metrics_table(study, starts).to_csv(index=False, float_format="%.6f")


def metrics_table(study: Study, starts: Sequence[StartResult]) -> pd.DataFrame:
    """Build the table of test metrics, with a row for each starting point and metric.

    The columns are ``network``, ``weights`` (the starting point), ``metric``, ``mean``, ``sd`` and
    ``seeds``. Mean and standard deviation are over the seeds that have the metric, and ``seeds`` is
    their number. For a single seed, ``sd`` is NaN. The rows are for the task's main metrics, except
    those that no seed has.
    """
    network = study.downstream.network
    table = []
    for result in starts:
        for metric in study.downstream.shown:
            row = result.row(metric)
            if row:
                table.append((network, result.label, metric, row.mean, row.sd, row.seeds))
    frame = pd.DataFrame(table, columns=["network", "weights", "metric", "mean", "sd", "seeds"])
    frame["sd"] = frame["sd"].where(frame["seeds"] > 1)
    return frame


def curves_csv(starts: Sequence[StartResult]) -> str:
    """Format the learning curves as CSV, with one value per row and 6 decimals.

    The columns are ``weights`` (the starting point), ``seed``, ``epoch``, ``split``, ``metric`` and
    ``value``. Rows are in the order of training.
    """
    table = []
    for result in starts:
        for trained in result.trained:
            for point in trained.curves:
                table.append((result.label, trained.seed, *point))
    columns = ["weights", "seed", "epoch", "split", "metric", "value"]
    return pd.DataFrame(table, columns=columns).to_csv(index=False, float_format="%.6f")


def document(study: Study, starts: Sequence[StartResult]) -> dict[str, Any]:
    """Build the content of finetune.json as a dictionary.

    The keys are:

    - ``task``, ``network``, ``dataset`` and ``sites``
    - ``images``: the number of images of each split
    - ``classes``: the names of the classes, or their number if the data set does not name them
    - ``epochs``, and ``epoch chosen by``: the metric whose validation value decided on the best
      epoch
    - ``definitions``: the definition of each metric in words
    - ``settings``: the settings of the data, the network and the training
    - ``lines``: the results of each starting point, in order
    """
    task, data = study.downstream, study.data
    return {
        "task": task.name,
        "network": task.network,
        "dataset": study.settings.dataset,
        "sites": list(data.sites),
        "images": data.sizes(),
        "classes": list(data.classes) or data.shape.outputs,
        "epochs": study.epochs,
        "epoch chosen by": f"val {task.headline}",
        "definitions": dict(task.definitions),
        "settings": used_settings(study.settings, study.downstream.name),
        "lines": [_start_document(result) for result in starts],
    }


def _start_document(result: StartResult) -> dict[str, Any]:
    """Build the entry of a starting point in finetune.json.

    ``seeds`` has each seed's best epoch, the metrics of that epoch on validation and test images,
    and the duration in seconds. ``mean`` and ``sd`` summarise each test metric over the seeds that
    have it. If only one seed has a metric, ``sd`` lacks it.

    ``taken`` is the report on arrays that were copied from the starting point, or None if none
    were. ``distilled`` is the report on distillation (training to imitate a run's ViT), or None
    without it.
    """
    metrics: set[str] = set()
    seeds = []
    for trained in result.trained:
        metrics.update(trained.test)
        seeds.append(
            {
                "seed": trained.seed,
                "epoch": trained.epoch,
                "val": trained.val,
                "test": trained.test,
                "seconds": round(trained.seconds, 3),
            }
        )
    means, deviations = {}, {}
    for metric in sorted(metrics):
        row = result.row(metric)
        assert row is not None, "some seed has the metric"
        means[metric] = row.mean
        # A standard deviation of 0 for a single seed would look like a measured spread
        if row.seeds > 1:
            deviations[metric] = row.sd
    taken, distilled = None, None
    if isinstance(result.transfer, TransferReport):
        taken = asdict(result.transfer)
    if isinstance(result.transfer, DistilReport):
        distilled = asdict(result.transfer)
    return {
        "weights": result.label,
        "method": result.method or None,
        "taken": taken,
        "distilled": distilled,
        "mean": means,
        "sd": deviations,
        "seeds": seeds,
    }


# Colours that colour-blind people can distinguish too (Okabe and Ito)
TRUTH = (0.34, 0.71, 0.91)
HIT, FALSE, MISSED = (0.0, 0.75, 0.45), (0.95, 0.75, 0.0), (0.9, 0.2, 0.75)
_LEGEND = {"truth": TRUTH, "found": HIT, "found where none is": FALSE, "missed": MISSED}
_OPACITY = 0.75


def spread_rows(origin: Sequence[str], count: int) -> list[int]:
    """Choose up to ``count`` rows that are spread evenly over the sites, and return their numbers.

    ``origin`` has the site of each row. The first row of every site is chosen before the second row
    of any site, and so on. The numbers are in ascending order.
    """
    # Each row's position within its site; the stable sort takes position 0 of all sites first
    turns = pd.Series(origin).groupby(list(origin)).cumcount()
    return sorted(turns.sort_values(kind="stable").index[:count].tolist())


def colour_masks(predicted: Tensor, mask: Tensor) -> Tensor:
    """Colour the pixels of a predicted and a true mask, as a layer to draw over an image.

    Hits (in both masks), false alarms (only predicted) and missed pixels (only true) each have a
    colour, with the same opacity. Pixels outside both masks are transparent.

    Args:
        predicted: the predicted mask (h, w), 0 or 1.
        mask: the true mask (h, w), 0 or 1.

    Returns:
        RGBA (h, w, 4) in [0, 1].
    """
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
    """Draw a row for each test image: the image, its true mask, and the predicted masks.

    There is a predicted mask for each starting point, with different colours for hits, false alarms
    and missed pixels. Its caption is the Dice score, or '(rightly none)' if the true mask is empty
    too. The caption of an empty true mask is '(no catheter)'.

    Args:
        images: the images (n, channels, h, w), with the pixels that a site stores.
        masks: the true masks (n, h, w), 0 or 1. A mask marks the catheters in a radiograph.
        predicted: label of a starting point -> its predicted masks (n, h, w).
        names: the caption of each image.
        title: the title of the picture.
    """
    from matplotlib.patches import Patch

    columns = 2 + len(predicted)
    figure = new_figure(2.5 * columns, 1.0 + 2.7 * len(images))
    panels = figure.subplots(len(images), columns, squeeze=False)
    dice = {}
    for label, marked in predicted.items():
        dice[label] = image_dice(overlaps(marked, masks))
    for row, (first, second, *others) in enumerate(panels):
        _draw_panel(first, images[row], None, names[row])
        truth = torch.zeros(*masks[row].shape, 4)
        truth[masks[row].bool()] = torch.tensor([*TRUTH, _OPACITY])
        caption = ""
        if not masks[row].any():
            caption = "(no catheter)"
        _draw_panel(second, images[row], truth, caption)
        for axes, (label, marked) in zip(others, predicted.items(), strict=True):
            value = float(dice[label][row])
            caption = f"Dice {value:.2f}"
            # Dice is undefined if both masks are empty, which is a correct prediction
            if math.isnan(value):
                caption = "(rightly none)"
            _draw_panel(axes, images[row], colour_masks(marked[row], masks[row]), caption)
    for axes, head in zip(panels[0], ["image", "truth", *predicted], strict=True):
        axes.set_title(head, fontsize="small", wrap=True)
    patches = [Patch(color=colour, label=name) for name, colour in _LEGEND.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_panel(axes: Axes, image: Tensor, layer: Tensor | None, caption: str) -> None:
    draw_image(axes, image)
    if layer is not None:
        # draw_image shrinks a large image, so the layer takes its extent
        axes.imshow(layer.numpy(), interpolation="nearest", extent=axes.images[0].get_extent())
    without_frame(axes)
    axes.set_xlabel(caption, fontsize="small")
