"""Predicts masks of new images with the segmentation network that ``fedsilo finetune`` wrote.

The result is a folder with a PNG per image, 255 on the catheter, and a table. A mask belongs to the
image as the network sees it: decoded, cropped and resized as its training images were.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import compute_of
from fedsilo.core.arguments import refuse_target
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.atomic_files import build_folder
from fedsilo.core.files.state_files import load_state, state_digest
from fedsilo.core.methods import load_plugin_files
from fedsilo.core.plugins import without_working_folder
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import current_settings
from fedsilo.core.settings_schema import build_from_file
from fedsilo.core.versions import installed_software
from fedsilo.datasets.registry import image_reader, plugin_modules
from fedsilo.finetuning.finetune_request import SEGMENTATION
from fedsilo.finetuning.tasks import predicted_masks
from fedsilo.inference.predict.inputs import CaseSource, FileInputs, Watch, file_inputs
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.segmentation.build_segmentation import build_segmentation
from fedsilo.pages.notebook import html_of_lines
from fedsilo.server_app.config.trusted_plugins import approve_plugins
from fedsilo.server_app.records.run_directory import RunDirectory

_DOCUMENT = "finetune.json"


@dataclass(frozen=True)
class MaskPredictions:
    """The result of predicting masks: the folder, and which images have a mask."""

    folder: Path
    shares: Mapping[str, float]  # file -> share of its pixels that are marked, 0 to 1
    faults: Mapping[str, str]  # file -> why its mask is missing
    marked: str = "a catheter"  # what a mask marks, for the line of text

    def lines(self) -> list[str]:
        """Describe the predicted masks in lines for a terminal.

        The first line has two numbers: how many masks there are, and how many of them have at least
        one marked pixel. If some images have no mask, the next line has the number of these images.
        The last line is the path of the folder.
        """
        found = sum(share > 0 for share in self.shares.values())
        lines = [f"{len(self.shares)} masks, {self.marked} in {found}"]
        if self.faults:
            lines.append(f"{len(self.faults)} without a mask: column 'fault' says why")
        return [*lines, str(self.folder)]

    def _repr_html_(self) -> str:
        """Convert the lines of the terminal to HTML for a notebook."""
        return html_of_lines(self.lines())

    def frame(self) -> pd.DataFrame:
        """Return the rows of masks.csv: ``file``, ``mask``, a share per class, and ``fault``."""
        return pd.read_csv(self.folder / "masks.csv")


def is_finetuned(folder: Path) -> bool:
    """Tell whether ``fedsilo finetune`` has written a folder, by its file finetune.json."""
    return (folder / _DOCUMENT).is_file()


def refuse_options(folder: Path, options: Mapping[str, object]) -> None:
    """Check that the user gave no option of ``predict`` that does not apply to masks.

    Args:
        folder: the folder of the model, for the error.
        options: name of an option that does not apply -> its value. None or False means that it is
            not given.

    Raises:
        SettingError: an option is given. The message names the first one.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise SettingError(
                f"--{name} does not apply to the masks that the model in {folder} predicts: "
                f"remove --{name}"
            )


def predict_masks(
    folder: Path, source: CaseSource, out: Path | None, data_dir: Path | None, watch: Watch
) -> MaskPredictions:
    """Predict a mask for each image of a source, and write the masks and a table to a new folder.

    The fine-tuned network marks one class, a catheter. The folder has a PNG file for each mask,
    with 255 on the catheter and 0 elsewhere. masks.csv has a row for each image, and masks.json
    describes the masks. An image that cannot be read has a row with the reason, but no mask. The
    folder appears only when it is complete.

    Args:
        folder: the folder that ``fedsilo finetune`` wrote.
        source: the images.
        out: the folder to write, which must not exist. None, if the user named no folder, is an
            error.
        data_dir: the data directory. None means the one in the settings of the fine-tuning.
        watch: takes the number of images read so far, and the number of all images.

    Raises:
        FedsiloError: the model or the images cannot be opened, two images would have the same mask
            file, or ``out`` exists or is None.
    """
    if out is None:
        raise SettingError("masks are written to a folder: name one by --out")
    refuse_target(out, "another --out")
    document, arrays, digest = _open_folder(folder)
    settings = _settings(document, data_dir)
    numbers = (settings.image_size or 512) ** 2
    inputs = file_inputs(source, image_reader("", settings), numbers)
    refuse_equal_masks(inputs.names)
    shares: dict[str, float] = {}

    def fill(work: Path) -> None:
        network: nn.Module | None = None
        masks: list[Tensor] = []
        for batch in inputs.watch_batches(watch):
            # Only the first batch tells the shape of the images
            network = network or _network(document, settings, arrays, batch)
            masks += predicted_masks(network, batch, compute_of(settings)).unbind()
        # Only now is it known which files could be read
        for place, mask in zip(inputs.kept(), masks, strict=True):
            name = inputs.names[place]
            shares[name] = (mask == 1).double().mean().item()
            _write_mask(work / mask_name(name), mask)
        about = _about(folder, document, digest)
        (work / "masks.json").write_text(json.dumps(about, indent=2) + "\n")
        (work / "masks.csv").write_text(_table(inputs, shares))

    build_folder(out, fill)
    faults = {inputs.names[place]: reason for place, reason in inputs.faults.items()}
    return MaskPredictions(out, shares, faults)


def refuse_equal_masks(names: Sequence[str]) -> None:
    """Check that images with different names have different mask files (``mask_name``).

    Raises:
        DataError: two images would share a file. The message names the first such pair.
    """
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(mask_name(name), name)
        if other != name:
            raise DataError(f"the masks of '{other}' and '{name}' would be one file: rename one")


def _open_folder(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Tensor], str]:
    """Read a segmentation network from the folder that ``fedsilo finetune`` wrote.

    Returns:
        The content of finetune.json, the network's weights (name -> tensor), and their digest.

    Raises:
        RunDirectoryError: finetune.json is missing or damaged.
        CheckpointError: the model is damaged.
        SettingError: the model is a classifier.
    """
    document: Mapping[str, Any] = RunDirectory(folder).read_json(_DOCUMENT)
    if document["task"] != SEGMENTATION:
        raise SettingError(
            f"{folder} has a fine-tuned classifier, but masks need a network of --task "
            f"{SEGMENTATION}: name the folder of such a network, or a run's"
        )
    arrays, _ = load_state(folder / "model.safetensors")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return document, tensors, state_digest(arrays, {})


def _settings(document: Mapping[str, Any], data_dir: Path | None) -> CommonSettings:
    # A folder of somebody else must not choose where decoded data are written
    values = current_settings(document["settings"], quietly=True) | {"data.cache-dir": ""}
    if data_dir is not None:
        values |= {"data.dir": str(data_dir)}
    # The folder may come from anybody, so only plugins that this user approved are run
    with without_working_folder():
        approved = approve_plugins(values, plugin_modules(values), needs_pins=False)
        load_plugin_files(str(approved["plugin"]))
        return build_from_file(CommonSettings, approved)


def _network(
    document: Mapping[str, Any],
    settings: CommonSettings,
    arrays: Mapping[str, Tensor],
    batch: Tensor,
) -> nn.Module:
    """Build the fine-tuned network for images of the shape of ``batch``.

    The network is on the device that the settings name.

    Args:
        document: the content of finetune.json, with the network's name and its classes.
        settings: the settings of the fine-tuning.
        arrays: name -> tensor of the trained network's weights.
        batch: a batch of images (b, channels, h, w). Only its shape is used.

    Raises:
        DataError: the weights do not fit, because the network was trained on images with other
            channels or another size.
    """
    classes = document["classes"]
    if not isinstance(classes, int):
        classes = len(classes)
    task = NetworkShape(tuple(batch.shape[1:]), classes)
    network = build_segmentation(document["network"], settings, task)
    try:
        network.load_state_dict(dict(arrays))
    except RuntimeError:
        raise DataError(
            f"images are {tuple(batch.shape[1:])}, but the network was trained on another shape: "
            f"restore the declaration or the settings of data set '{settings.dataset}'"
        ) from None
    return compute_of(settings).place(network)


def mask_name(name: str) -> str:
    """Return the path of an image's mask in the folder of masks: the image's name with .png added.

    A name that already ends in .png, in upper or lower case, gets no second ending. Parts such as
    ``..`` are resolved, so that the path stays inside the folder. Different names can therefore
    have the same path, such as ``a`` and ``a.png``.
    """
    # An absolute path cannot go above its root, so '..' at the start is dropped
    inside = os.path.normpath(f"/{name}").lstrip("/")
    if inside.lower().endswith(".png"):
        return inside
    return f"{inside}.png"


def _write_mask(path: Path, mask: Tensor) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((mask == 1).numpy().astype(np.uint8) * 255).save(path)


def _table(inputs: FileInputs, shares: Mapping[str, float]) -> str:
    rows: list[tuple[str, str | None, float | None, str | None]] = []
    for place, name in enumerate(inputs.names):
        mask = None
        if name in shares:
            mask = mask_name(name)
        rows.append((name, mask, shares.get(name), inputs.faults.get(place)))
    frame = pd.DataFrame(rows, columns=["file", "mask", "catheter", "fault"])
    return frame.to_csv(index=False)


def _about(folder: Path, document: Mapping[str, Any], digest: str) -> dict[str, Any]:
    return {
        "model": folder.resolve().name,
        "weights": digest,
        "network": document["network"],
        "dataset": document["dataset"],
        "settings": document["settings"],
        "columns": {
            "mask": "the PNG in this folder, 255 on the catheter, for the image as it was decoded",
            "catheter": "share of the pixels on the catheter",
            "fault": "why there is no mask",
        },
        "software": installed_software(),
    }
