"""``fedsilo predict --html`` for a segmentation: a page of images with the outlines of their masks.

The page holds patients' images and stays where the predictions were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedsilo.core.one_line import format_count, join_names
from fedsilo.explanations.mask_overlays import draw_marked
from fedsilo.inference.predict.case_answers import Bar
from fedsilo.inference.predict.case_details import PICTURES, as_png, data_url, read_image
from fedsilo.inference.predict.cases import MOST, STATES, page_facts
from fedsilo.inference.predict.inputs import Inputs
from fedsilo.inference.predict.task_case_answers import site_values
from fedsilo.pages.page import render_page
from fedsilo.pictures.panel_grids import new_figure
from fedsilo.reports.clinic import TITLE, WARNING
from fedsilo.runs.finished_run import Shown
from fedsilo.runs.trained_model import TrainedModel


def mask_page(
    run: Shown,
    model: TrainedModel,
    inputs: Inputs,
    masks: Sequence[Tensor],
    shares: Mapping[str, Sequence[float]],
    document: Mapping[str, Any],
) -> str:
    """Build the HTML page of predicted masks, with the images that could not be read first.

    The page shows at most 200 images. Among them, the first 50 that could be read have a picture.

    Args:
        run: a view of the run without the metrics and counts that pages must not show.
        model: the model.
        inputs: the images.
        masks: the masks of the images that could be read, (h, w) each, with class numbers.
        shares: name of an image -> the share of its pixels in each class except the background.
        document: the content of masks.json.
    """
    kept = {place: index for index, place in enumerate(inputs.kept())}
    # Images that could not be read need a look, and are first
    order = sorted(range(len(inputs.names)), key=lambda place: (place in kept, place))
    classes = model.classes[1:]
    cases = []
    for place in order[:MOST]:
        case = _case(inputs, place, classes, shares)
        if place in kept and kept[place] < PICTURES:
            case |= _picture(inputs, place, kept[place], masks[kept[place]], classes)
        cases.append(case)
    left_out = ""
    if len(order) > MOST:
        left_out = f"{len(order) - MOST} more images are only in masks.csv."
    sentence = (
        f"The model marks {join_names(classes)} in each of "
        f"{format_count(len(inputs.names), 'image')}. {model.title} trained it at "
        f"{format_count(len(model.sites), 'site')}. Not used: "
        f"{format_count(len(inputs.faults), 'image')}."
    )
    return render_page(
        "cases.html",
        "Images and predicted masks",
        {
            "warning": WARNING,
            "sentence": sentence,
            "facts": page_facts(model, inputs, document),
            "columns": ["image", "look", *(f"{name}, share of pixels" for name in classes)],
            "overview": [case["row"] for case in cases],
            "overview_note": "Images without a mask come first, then the others in their order.",
            "cases": cases,
            "left_out": left_out,
            "limits": _limits(run, model),
        },
        subtitle=f"{model.title} on {model.common.dataset}, run {document['run']}",
        foot=f"{TITLE}. {WARNING} This page holds patients' data: keep it where they are.",
    )


def _case(
    inputs: Inputs, place: int, classes: Sequence[str], shares: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Build the template variables of one image on the page, without its picture.

    If the image could not be read, ``state`` is "refused", and ``why`` has the reason. For any
    other image, ``bars`` has a bar for each class except the background. The bar shows the share of
    the image's pixels in this class. ``row`` has the image's cells for the overview table.

    Args:
        inputs: the images.
        place: the index of the image among all inputs.
        classes: the names of the classes without the background.
        shares: name of an image -> the share of its pixels in each of these classes. An image that
            could not be read is missing.
    """
    name = inputs.names[place]
    state, cells, bars = "refused", ["-"] * len(classes), []
    if name in shares:
        state = "usual"
        cells = [f"{share:.1%}" for share in shares[name]]
        for label, share, text in zip(classes, shares[name], cells, strict=True):
            bars.append(Bar(label, share, f"{text} of the pixels"))
    title = f"{inputs.key} {name}"
    headline = "mask predicted" if bars else STATES[state]
    return {
        "name": title,
        "state": state,
        "headline": headline,
        "why": inputs.faults.get(place, ""),
        "bars": bars,
        "row": [title, headline, *cells],
        "notes": [],
        "inputs": [],
        "image": "",
    }


def _picture(
    inputs: Inputs, place: int, index: int, mask: Tensor, classes: Sequence[str]
) -> dict[str, str]:
    """Draw an image, and beside it the same image with the outlines of its predicted mask.

    Both are drawn as the network sees the image.

    Args:
        inputs: the images.
        place: the index of the image among all inputs.
        index: the index of the image among the readable inputs.
        mask: the predicted mask (h, w) with class numbers.
        classes: the names of the classes without the background.

    Returns:
        Template variables: the picture as a data URL, and a description of it.
    """
    figure = new_figure(5.0, 2.9)
    draw_marked(figure, read_image(inputs, place, index), mask, classes)
    words = "The image as the network sees it, and with the outlines of its predicted mask."
    return {"image": data_url(as_png(figure)), "image_text": words}


def _limits(run: Shown, model: TrainedModel) -> list[str]:
    """List sentences on how good the masks are, and on the limits of the page.

    The first sentence has the Dice score on test images. It is left out if every score is hidden
    because of too few patients. Two more sentences say that the network sees only the central
    square of an image, and that masks have no novelty.
    """
    values, where = site_values(run, model)
    said = [
        "A mask belongs to the image as the network sees it: its central square, resized to "
        f"{model.silo.shape.input_shape[-1]} pixels per side.",
        "It is not known whether an image is like the training images: masks have no novelty.",
    ]
    if "dice" in values:
        said.insert(
            0,
            f"On test images, masks had a Dice score of {values['dice']:.2f} ({where}); 1 is a "
            "perfect mask, and 0 a missed one.",
        )
    return said
