"""``fedsilo gradcam``: where runs' convolutional networks find a class in a site's images.

It runs where the images lie, as ``fedsilo explain`` does; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from client_app.explain.gradcam import explain_by_grad_cam
from client_app.explain.image_explanation import ImageExplanation, draw_image, draw_map
from client_app.methods.base import SiteMethod, refuse_row
from datasets.silo.silos import Silo
from models.contract.errors import SettingError
from models.figures.palette import BLACK, WRONG
from models.figures.panels import without_frame
from models.networks.site_network import SiteNetwork
from server_app.figures.style import run_title
from server_app.records.finished_site import finished_settings, naming, opened, refuse_shared_state

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Column:
    """What one run made of the images: its title and an explanation of each row."""

    title: str
    explanations: list[ImageExplanation]


@dataclass(frozen=True)
class GradCamSheet:
    """What runs made of the same images: a title, a column per run, and the images' classes."""

    title: str
    columns: list[Column]
    truths: list[int]


def gradcam(
    run_dirs: Sequence[Path],
    site: str,
    rows: Sequence[int],
    split: str = "test",
    label: str | None = None,
    data_dir: Path | None = None,
    state_dir: Path | None = None,
) -> GradCamSheet:
    """Return where the networks of one or several runs find a class in a site's images.

    Args:
        run_dirs: finished runs on the same data.
        site: the images' site; its data must be here.
        rows: of the split, from 0.
        split: train, val or test.
        label: the name of the class; None: in each image what each network says.
        data_dir: the data directory; None: the run's own.
        state_dir: the folder of the site's private state; None: the run directory's.

    Raises:
        FedsiloError: a run has not ended, has no convolutional network or other images, or there is
            no such row or class.
    """
    refuse_shared_state(state_dir, run_dirs, 1)
    # Before anything is computed: have all the runs ended?
    titles = [run_title(run, finished_settings(run, data_dir)) for run in run_dirs]
    columns: list[Column] = []
    first: Silo | None = None
    for run_dir, title in zip(run_dirs, titles, strict=True):
        with naming(run_dir):
            method, network = opened(run_dir, site, data_dir, state_dir)
            first = first or method.silo
            _refuse_other_images(first, method.silo, split)
            columns.append(Column(title, _explanations(method, network, split, rows, label)))
    labels = method.silo.splits()[split].labels
    subject = f"Grad-CAM of class {label}" if label else "Grad-CAM of what each network says"
    return GradCamSheet(f"{site}: {subject}", columns, [int(labels[row]) for row in rows])


def _explanations(
    method: SiteMethod, network: SiteNetwork, split: str, rows: Sequence[int], wanted: str | None
) -> list[ImageExplanation]:
    names = list(method.silo.class_names())
    if wanted is not None and wanted not in names:
        raise SettingError(f"--class is '{wanted}'; the classes are {', '.join(names)}")
    label = None if wanted is None else names.index(wanted)
    held, explanations = method.silo.splits()[split], []
    for row in rows:
        refuse_row(method.silo, split, row)
        title = f"{split} row {row}\ntruth {names[int(held.labels[row])]}"
        explanations.append(
            explain_by_grad_cam(network, held, method.compute, row, title, names, label)
        )
    return explanations


def draw_sheet(sheet: GradCamSheet) -> Figure:
    """Return the picture: a row per image, a column with the image itself and one per run.

    Each map is in its own colours. An answer that is not the truth stands in another colour.
    """
    from matplotlib.figure import Figure

    columns, rows = sheet.columns, len(sheet.truths)
    head = max(column.title.count("\n") for column in columns)
    size = (2.6 * (1 + len(columns)), 0.7 + 0.2 * head + 2.85 * rows)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, 1 + len(columns), squeeze=False)
    for index, (truth, (first, *others)) in enumerate(zip(sheet.truths, panels, strict=True)):
        shown = columns[0].explanations[index]
        draw_image(first, shown.image)
        _caption(first, shown.title)
        for axes, column in zip(others, columns, strict=True):
            explanation = column.explanations[index]
            draw_map(axes, explanation.image, explanation.saliency)
            right = explanation.answer() == truth
            _caption(axes, _answer(explanation), BLACK if right else WRONG)
    for axes, heading in zip(
        panels[0], ["image", *(column.title for column in columns)], strict=True
    ):
        axes.set_title(heading, fontsize="small")
    figure.suptitle(sheet.title, fontsize="medium")
    return figure


def _answer(explanation: ImageExplanation) -> str:
    """Return what a network said, and where that differs the class that is drawn."""
    answer, drawn = explanation.answer(), explanation.saliency.label
    classes, shares = explanation.classes, explanation.probabilities
    caption = f"says {classes[answer]}: {shares[answer]:.2f}"
    if drawn is not None and drawn != answer:
        caption += f"\nmap of {classes[drawn]}: {shares[drawn]:.2f}"
    return caption if explanation.saliency.values.any() else f"{caption}\n(nothing speaks for it)"


def _caption(axes: Axes, text: str, colour: str = BLACK) -> None:
    without_frame(axes)
    axes.set_xlabel(text, fontsize="small", color=colour)


def _refuse_other_images(first: Silo, silo: Silo, split: str) -> None:
    same = first.fingerprints[split] == silo.fingerprints[split]
    if not same or first.class_names() != silo.class_names():
        raise SettingError(
            f"its {split} images or classes of site {silo.name} are not those of the first run: "
            "name runs with the same data settings"
        )
