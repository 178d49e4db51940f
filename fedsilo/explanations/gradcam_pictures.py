"""``fedsilo gradcam``: draws the image regions that make convolutional networks find a class.

It runs on the machine with the images; nothing is sent.
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
    """The explanations of all images by one run, which are a column of the sheet."""

    title: str
    explanations: list[ImageExplanation]  # one per image, in the order of the rows


@dataclass(frozen=True)
class GradCamSheet:
    """Explanations of the same images by several runs: a row per image, a column per run."""

    title: str
    columns: list[RunColumn]  # one per run
    truths: list[int]  # the true class of each image
    reasons: list[str] = field(default_factory=list)  # each image's scenario; "" if chosen by row


def choose_rows_by_scenario(
    truths: Tensor, answers: Sequence[Tensor], each: int
) -> list[tuple[int, str]]:
    """Choose example images by a fixed rule, so that nobody can pick convincing ones.

    The scenario of an image depends on which runs predict it correctly:

    - "all are right"
    - "all are wrong"
    - "the first alone is right"
    - "the second is right, the first is not". Further runs do not matter here.

    For each scenario and true class, the first ``each`` images of the split are chosen.

    Args:
        truths: (n,), the true classes.
        answers: the predicted classes (n,) of each run, for at least two runs.
        each: the largest number of images per scenario and class.

    Returns:
        The row and the scenario's name for each chosen image, sorted by scenario as listed, then by
        class, then by row. Images of no scenario are left out.
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
    # The scenarios exclude each other, so an image is chosen at most once
    chosen = []
    for name, fit in fits.items():
        for label in sorted(set(truths.tolist())):
            rows = (fit & (truths == label)).nonzero().flatten()
            chosen += [(int(row), name) for row in rows[:each]]
    return chosen


@dataclass(frozen=True)
class OpenedRun:
    """A finished run, opened at one site, with the network that the site has after the run."""

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
    """Open the networks that several runs left at one site, to compare them on the same images.

    The site's data must be on this machine.

    Args:
        runs: the finished runs.
        site: the name of the site.
        split: 'train', 'val' or 'test'.
        data_dir: the data directory; None for the directory that each run used.
        state_dir: the folder with the site's private state; None for the folder in each run
            directory.

    Returns:
        The opened runs, in the order of ``runs``.

    Raises:
        FedsiloError: the site is not in a run, or a run's network is not convolutional. Also raised
            if a run's images in the split, or its classes, differ from those of the first run.
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
    """Choose example images of a split by which runs predict them correctly.

    ``choose_rows_by_scenario`` lists the scenarios, such as "all are right". Each network predicts
    all images of the split in fp32, as in the explanations. All runs must have the same images.

    Args:
        runs: the opened runs, at least two.
        each: the largest number of images per scenario and true class.
        split: 'train', 'val' or 'test'.

    Returns:
        The row and the scenario's name for each chosen image.

    Raises:
        SettingError: none of the images fits a scenario.
    """
    silo = runs[0].lab.silo
    held = silo.splits()[split]
    answers = []
    for one in runs:
        # fp32, as in the explanations, so that their captions show the same predictions
        exact = one.lab.compute.exact()
        answers.append(over_batches(one.network, held.inputs, exact, one.network).argmax(dim=1))
    chosen = choose_rows_by_scenario(held.labels, answers, each)
    if not chosen:
        raise SettingError(f"site {silo.name} has no {split} images that fit a scenario")
    return chosen


def gradcam_sheet(
    runs: Sequence[OpenedRun], chosen: Sequence[tuple[int, str]], split: str, label: str | None
) -> GradCamSheet:
    """Compute a Grad-CAM map of each chosen image for each run.

    The map shows which places of an image speak for a class.

    Args:
        runs: the opened runs; the sheet has a column for each.
        chosen: the row and the scenario of each image. The scenario is "" for rows that the user
            gave.
        split: 'train', 'val' or 'test'.
        label: the name of the class whose map is drawn; None for each network's own prediction.

    Raises:
        FedsiloError: a row or the class does not exist. The error names the run directory.
    """
    columns, rows = [], [row for row, _ in chosen]
    for one in runs:
        with naming(one.run.path):
            shown = _explain_rows(one.lab, one.network, split, rows, label)
            columns.append(RunColumn(run_title(one.run), shown))
    subject = "Grad-CAM of what each network says"
    if label:
        subject = f"Grad-CAM of class {label}"
    silo = runs[0].lab.silo
    labels = silo.splits()[split].labels
    truths = [int(labels[row]) for row in rows]
    reasons = [reason for _, reason in chosen]
    return GradCamSheet(f"{silo.name}: {subject}", columns, truths, reasons)


def _explain_rows(
    lab: Lab, network: SiteNetwork, split: str, rows: Sequence[int], wanted: str | None
) -> list[ImageExplanation]:
    """Explain a network's predictions for some images by Grad-CAM, in the order of ``rows``.

    The title of an explanation names the row and the true class of the image.

    Args:
        lab: the site's data.
        network: the network of one run at this site.
        split: 'train', 'val' or 'test'.
        rows: the numbers of the images in the split, counted from 0.
        wanted: the name of the class whose map is drawn; None for the predicted class of each
            image.

    Raises:
        FedsiloError: the class is unknown, or a row is not in the split.
    """
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
    """Draw a sheet of Grad-CAM maps, with a row for each image and a column for each run.

    The first column shows the images, with their number in the split, true class and scenario.
    Further columns show the images under the maps of a run. The caption of a map gives the run's
    prediction, in red if it is wrong. Colours cannot be compared between maps, because each map has
    its own scale.
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
            _caption(axes, _format_prediction(explanation), colour)
    headings = ["image", *(column.title for column in columns)]
    for axes, heading in zip(panels[0], headings, strict=True):
        axes.set_title(heading, fontsize="small")
    figure.suptitle(sheet.title, fontsize="medium")
    return figure


def _format_prediction(explanation: ImageExplanation) -> str:
    """Format the caption of a map: the predicted class with its probability.

    If the map is of another class, a second line gives that class with its probability. If the map
    is 0 everywhere, a last line says that no region supports the class.
    """
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
    """Raise an error unless two runs have the same images in ``split`` and the same classes.

    Args:
        first: the site's data in the first run.
        silo: the same site's data in another run.
        split: 'train', 'val' or 'test'.

    Raises:
        SettingError: the names of the classes differ, or the SHA-256 fingerprints of the split
            differ.
    """
    # A fingerprint is a SHA-256 of the split, so it tells images apart that have the same names
    same = first.fingerprints[split] == silo.fingerprints[split]
    if not same or first.class_names() != silo.class_names():
        raise SettingError(
            f"the {split} images or classes of site {silo.name} differ from those of the first "
            "run: name runs with the same data settings"
        )
