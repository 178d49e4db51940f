"""Predicts masks of new images, or of a site's own images, with a run's segmentation model.

The result is a folder with a PNG per image and a table. A mask belongs to the image as the network
sees it: decoded, cropped and resized as its training images were.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.core.arguments import refuse_target
from fedsilo.core.drawing.palette import CATEGORIES
from fedsilo.core.errors import SettingError
from fedsilo.core.files.atomic_files import build_folder, write_atomically
from fedsilo.core.versions import installed_software
from fedsilo.inference.predict.inputs import CaseSource, Inputs, Watch, open_inputs
from fedsilo.inference.predict.predicted_masks import (
    MaskPredictions,
    mask_name,
    refuse_equal_masks,
)
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.runs.trained_model import TrainedModel


def predict_run_masks(
    run: FinishedRun,
    model: TrainedModel,
    source: CaseSource,
    out: Path | None,
    html: Path | None,
    watch: Watch,
) -> MaskPredictions:
    """Predict a mask for each image of a source, and write the masks and a table to a new folder.

    A mask is a PNG file. The stored value of a pixel is the number of its class, 0 for the
    background. An image that cannot be read has a row in the table with the reason, but no mask.

    Args:
        run: a run whose task is segmentation.
        model: the run's model.
        source: the images, or a split of the model's site. A mask is named by its image or by its
            row in the split.
        out: the folder to write, which must not exist. None, if the user named no folder, is an
            error.
        html: the page of images with outlines to write, which must not exist. None means no page.
        watch: takes the number of images read so far, and the number of all images.

    Raises:
        FedsiloError: no image can be read, two images would have the same mask file, ``out`` is
            None, or ``out`` or ``html`` exists.
    """
    if out is None:
        raise SettingError("masks are written to a folder: name one by --out")
    refuse_target(out, "another --out")
    if html is not None:
        refuse_target(html, "another --html")
    inputs = open_inputs(model, source)
    refuse_equal_masks(inputs.names)
    shares: dict[str, list[float]] = {}
    # Kept until the page is drawn, because the folder is complete only after the last image
    masks: list[Tensor] = []

    def fill(work: Path) -> None:
        for batch in inputs.watch_batches(watch):
            masks.extend(_predict(model, batch).unbind())
        # Only now is it known which files could be read
        for place, mask in zip(inputs.kept(), masks, strict=True):
            name = inputs.names[place]
            shares[name] = _class_shares(mask, len(model.classes))
            _write_mask(work / mask_name(name), mask)
        (work / "masks.json").write_text(json.dumps(_about(model, inputs), indent=2) + "\n")
        (work / "masks.csv").write_text(_table(inputs, shares, model.classes))

    build_folder(out, fill)
    if html is not None:
        # Imported here, because only the page needs matplotlib
        from fedsilo.inference.predict.mask_page import mask_page

        page = mask_page(run.shown(), model, inputs, masks, shares, _about(model, inputs))
        write_atomically(html, page, 0o600)
    faults = {inputs.names[place]: reason for place, reason in inputs.faults.items()}
    marked = {name: sum(of_classes) for name, of_classes in shares.items()}
    return MaskPredictions(out, marked, faults, "something marked")


def _predict(model: TrainedModel, batch: Tensor) -> Tensor:
    """Predict the class of each pixel of images (batch, c, h, w): (batch, h, w) int64."""
    network = model.network
    compute = model.lab.compute.exact()
    return over_batches(network, batch, compute, lambda x: network(x).argmax(dim=1)).long()


def _class_shares(mask: Tensor, classes: int) -> list[float]:
    """Return the share of a mask's pixels that each class has, without the background."""
    counts = torch.bincount(mask.flatten(), minlength=classes)
    shares: list[float] = (counts[1:].double() / mask.numel()).tolist()
    return shares


def _write_mask(path: Path, mask: Tensor) -> None:
    """Write a mask (h, w) of class numbers as a PNG file, and create its folder if necessary.

    The stored value of a pixel is the number of its class, at most 255. The file also stores a
    palette, by which viewers show class 0 (the background) in black and any other class in a
    colour.
    """
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(mask.numpy().astype(np.uint8), mode="P")
    colours = [0, 0, 0]
    for number in range(1, 256):
        shown = CATEGORIES[number % len(CATEGORIES)].removeprefix("#")
        colours += [int(shown[start : start + 2], 16) for start in (0, 2, 4)]
    image.putpalette(colours)
    image.save(path)


def _table(inputs: Inputs, shares: Mapping[str, Sequence[float]], classes: Sequence[str]) -> str:
    """Build the text of masks.csv: a row for each input, in order.

    The columns are ``file``, ``mask``, one for each class except the background, and ``fault``.
    ``mask`` is the path of the PNG file. The column of a class has the share of the image's pixels
    in this class. For an input that could not be read, only ``file`` and ``fault`` have values.
    """
    rows: list[dict[str, Any]] = []
    for place, name in enumerate(inputs.names):
        row: dict[str, Any] = {"file": name, "mask": None}
        row |= dict.fromkeys(classes[1:])
        if name in shares:
            row |= {"mask": mask_name(name), **dict(zip(classes[1:], shares[name], strict=True))}
        rows.append(row | {"fault": inputs.faults.get(place)})
    return pd.DataFrame(rows).to_csv(index=False)


def _about(model: TrainedModel, inputs: Inputs) -> dict[str, Any]:
    """Build the content of masks.json, which describes the masks.

    The keys are ``run``, ``method``, ``dataset``, ``site``, ``model``, ``weights``, ``source``,
    ``classes``, ``columns`` and ``software``. ``model`` says whether the model is the site's own or
    shared. ``weights`` is the digest of the weights, ``source`` tells where the images came from,
    and ``columns`` explains the columns of masks.csv.
    """
    shares = {}
    for name in model.classes[1:]:
        shares[name] = f"share of the pixels of class {name}"
    return {
        "run": model.run_dir.resolve().name,
        "method": model.common.method,
        "dataset": model.common.dataset,
        "site": model.site,
        "model": "the site's own" if model.own else "of all sites",
        "weights": model.weights_digest(),
        "source": dict(inputs.source),
        "classes": list(model.classes),
        "columns": {
            "mask": "the PNG in this folder; its values are the classes' numbers, from 0",
            **shares,
            "fault": "why there is no mask",
        },
        "software": installed_software(),
    }
