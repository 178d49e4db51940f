"""``fedsilo gradcam``: draws the image regions by which convolutional networks find a class.

It runs where the images are, as ``fedsilo explain`` does; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.core.drawing.palette import BLACK, WRONG
from fedsilo.core.drawing.panels import without_frame
from fedsilo.core.errors import SettingError
from fedsilo.datasets.silo.silos import Silo
from fedsilo.explanations.image_explanation import ImageExplanation, draw_image, draw_map
from fedsilo.explanations.saliency_maps import explain_by_grad_cam, last_maps
from fedsilo.explanations.sample import refuse_row
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.pictures.panel_grids import (
    naming,
    new_figure,
    run_title,
)
from fedsilo.runs.finished_run import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RunColumn:
    """One run's column of the sheet: its title and an explanation of each image."""

    title: str
    explanations: list[ImageExplanation]


@dataclass(frozen=True)
class GradCamSheet:
    """Explanations of the same images by several runs."""

    title: str
    columns: list[RunColumn]  # one per run
    truths: list[int]  # the images' classes
    reasons: list[str] = field(default_factory=list)  # each image's scenario; empty if named by row


def by_scenario(truths: Tensor, answers: Sequence[Tensor], each: int) -> list[tuple[int, str]]:
    """Choose rows by which runs predict them correctly, at most ``each`` per scenario and class.

    The scenarios are Fed-Align-CL's (section V-d and figure 5): all runs are right, all are wrong,
    only the first is right ("ours against the federated ones"), the second is right and the first
    is not ("Fed-Align against ours"). The first images that fit are taken, in the order of the
    split, so that nobody can pick convincing ones.

    Args:
        truths: (n,), the classes.
        answers: the predicted classes (n,) of each run.
        each: the number of images.

    Returns:
        Row and scenario of each image.
    """
    right = torch.stack([answer == truths for answer in answers])  # (runs, n)
    # The paper compares its own method, the first run, with others
    first, others = right[0], right[1:]
    fits = {
        "all are right": right.all(dim=0),
        "all are wrong": ~right.any(dim=0),
        "the first alone is right": first & ~others.any(dim=0),
        "the second is right, the first is not": ~first & others[0],
    }
    chosen = []
    for name, fit in fits.items():
        for label in sorted(set(truths.tolist())):
            rows = (fit & (truths == label)).nonzero().flatten()
            chosen += [(int(row), name) for row in rows[:each]]
    return chosen


@dataclass(frozen=True)
class OpenedRun:
    """A run with the network that a site has after it."""

    run: FinishedRun
    lab: Lab
    network: SiteNetwork


def open_networks(
    runs: Sequence[FinishedRun],
    site: str,
    split: str,
    data_dir: Path | None,
    state_dir: Path | None,
) -> list[OpenedRun]:
    """Open the networks of runs at a site, whose data must be on this machine.

    Raises:
        FedsiloError: a run has no convolutional network, or other images than the first.
    """
    opened: list[OpenedRun] = []
    for run in runs:
        with naming(run.path):
            lab = run.lab(site, data_dir, state_dir, split=split)
            network = lab.open()
            opened.append(OpenedRun(run, lab, network))
            _refuse_other_images(opened[0].lab.silo, lab.silo, split)
            last_maps(network)  # refuses other networks before the first run is explained
    return opened


def choose_by_scenario(runs: Sequence[OpenedRun], each: int, split: str) -> list[tuple[int, str]]:
    """Choose rows by which runs predict them correctly; returns and chooses as ``by_scenario``.

    Raises:
        SettingError: no image fits a scenario.
    """
    silo = runs[0].lab.silo
    held = silo.splits()[split]
    answers = []
    for one in runs:
        exact = one.lab.compute.exact()
        answers.append(over_batches(one.network, held.inputs, exact, one.network).argmax(dim=1))
    chosen = by_scenario(held.labels, answers, each)
    if not chosen:
        raise SettingError(f"site {silo.name} has no {split} images that fit a scenario")
    return chosen


def gradcam_sheet(
    runs: Sequence[OpenedRun], chosen: Sequence[tuple[int, str]], split: str, label: str | None
) -> GradCamSheet:
    """Explain by Grad-CAM how the networks of runs find a class in images of a split.

    Args:
        runs: the runs, a column for each.
        chosen: row and scenario of each image; an empty scenario for rows that the user named.
        split: train, val or test.
        label: the name of the class; None for the prediction of each network for each image.

    Raises:
        FedsiloError: there is no such row or class.
    """
    columns, rows = [], [row for row, _ in chosen]
    for one in runs:
        with naming(one.run.path):
            shown = _explanations(one.lab, one.network, split, rows, label)
            columns.append(RunColumn(run_title(one.run), shown))
    subject = "Grad-CAM of what each network says"
    if label:
        subject = f"Grad-CAM of class {label}"
    silo = runs[0].lab.silo
    labels = silo.splits()[split].labels
    truths = [int(labels[row]) for row in rows]
    reasons = [reason for _, reason in chosen]
    return GradCamSheet(f"{silo.name}: {subject}", columns, truths, reasons)


def _explanations(
    lab: Lab, network: SiteNetwork, split: str, rows: Sequence[int], wanted: str | None
) -> list[ImageExplanation]:
    """Explain rows by the Grad-CAM of the class ``wanted``, or of the prediction if it is None."""
    names = list(lab.silo.class_names())
    label = None
    if wanted is not None:
        if wanted not in names:
            raise SettingError(f"--class must be one of {', '.join(names)}, but is '{wanted}'")
        label = names.index(wanted)
    held, explanations = lab.silo.splits()[split], []
    for row in rows:
        refuse_row(lab.silo, split, row)
        title = f"{split} row {row}\ntruth {names[int(held.labels[row])]}"
        explained = explain_by_grad_cam(network, held, lab.compute, row, title, names, label)
        explanations.append(explained)
    return explanations


def draw_sheet(sheet: GradCamSheet) -> Figure:
    """Draw a row per image: the image itself, and the image with each run's map.

    Each map has its own colour scale. The caption of a wrong prediction has another colour.
    """
    columns, rows = sheet.columns, len(sheet.truths)
    head = max(column.title.count("\n") for column in columns)
    figure = new_figure(2.6 * (1 + len(columns)), 0.7 + 0.2 * head + 2.85 * rows)
    panels = figure.subplots(rows, 1 + len(columns), squeeze=False)
    for index, (truth, (first, *others)) in enumerate(zip(sheet.truths, panels, strict=True)):
        shown = columns[0].explanations[index]
        draw_image(first, shown.image)
        caption = shown.title
        if sheet.reasons and sheet.reasons[index]:
            caption += f"\n{sheet.reasons[index]}"
        _caption(first, caption)
        for axes, column in zip(others, columns, strict=True):
            explanation = column.explanations[index]
            draw_map(axes, explanation.image, explanation.saliency)
            colour = BLACK if explanation.answer() == truth else WRONG
            _caption(axes, _answer(explanation), colour)
    headings = ["image", *(column.title for column in columns)]
    for axes, heading in zip(panels[0], headings, strict=True):
        axes.set_title(heading, fontsize="small")
    figure.suptitle(sheet.title, fontsize="medium")
    return figure


def _answer(explanation: ImageExplanation) -> str:
    """Format a network's prediction, and the class of the map if it is another one."""
    answer, drawn = explanation.answer(), explanation.saliency.label
    classes, shares = explanation.classes, explanation.probabilities
    caption = f"predicts {classes[answer]}: {shares[answer]:.2f}"
    if drawn is not None and drawn != answer:
        caption += f"\nmap of {classes[drawn]}: {shares[drawn]:.2f}"
    if not explanation.saliency.values.any():
        caption += "\n(no region supports it)"
    return caption


def _caption(axes: Axes, text: str, colour: str = BLACK) -> None:
    without_frame(axes)
    axes.set_xlabel(text, fontsize="small", color=colour)


def _refuse_other_images(first: Silo, silo: Silo, split: str) -> None:
    # A fingerprint is a SHA-256 of the split, so it tells images apart that have the same names
    same = first.fingerprints[split] == silo.fingerprints[split]
    if not same or first.class_names() != silo.class_names():
        raise SettingError(
            f"the {split} images or classes of site {silo.name} differ from those of the first "
            "run: name runs with the same data settings"
        )
