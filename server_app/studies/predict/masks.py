"""Masks of new images, by the segmentation network that ``fedsilo finetune`` has written.

A folder, whole or not at all: a PNG per image, 255 on the catheter, and a table. A mask is of the
image as the network sees it: decoded, cut and resized as the images of its training were.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import compute_of
from fedsilo.datasets.io.atomic_files import build_folder
from fedsilo.datasets.io.state_files import load_state, state_digest
from fedsilo.datasets.registry import image_reader
from fedsilo.models.contract.errors import CheckpointError, DataError, SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import build
from fedsilo.models.contract.versions import installed_software
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.segmentation import build_segmentation
from fedsilo.server_app.studies.finetune.request import SEGMENTATION, refuse_target
from fedsilo.server_app.studies.finetune.tasks import predicted_masks
from fedsilo.server_app.studies.predict.inputs import FileInputs, Watch, counted, files_of
from fedsilo.server_app.studies.predict.request import PredictRequest

_DOCUMENT, _TABLE = "finetune.json", "masks.csv"


@dataclass(frozen=True)
class MaskPredictions:
    """Where masks were written.

    Attributes:
        folder: the folder.
        shares: file -> share of its pixels on the catheter.
        faults: file -> why it has no mask.
    """

    folder: Path
    shares: Mapping[str, float]
    faults: Mapping[str, str]

    def lines(self) -> list[str]:
        """Return a summary for a terminal."""
        found = sum(share > 0 for share in self.shares.values())
        lines = [f"{len(self.shares)} masks, a catheter in {found}"]
        if self.faults:
            lines.append(f"{len(self.faults)} without a mask: column 'fault' says why")
        return [*lines, str(self.folder)]


def is_finetuned(folder: Path) -> bool:
    """Tell whether a folder is what ``fedsilo finetune`` writes."""
    return (folder / _DOCUMENT).is_file()


def predict_masks(
    request: PredictRequest, watch: Watch = lambda done, total: None
) -> MaskPredictions:
    """Write a mask for each image that a request names; its ``run_dir`` is finetune's folder.

    Args:
        request: ``images`` or ``manifest``, and ``out``, a folder that is not there yet.
        watch: is told how many images have been read, and of how many.

    Raises:
        FedsiloError: the model or the images cannot be opened, or the folder is there already.
    """
    if request.out is None:
        raise SettingError("masks are written to a folder: name one by --out")
    refuse_target(request.out, "another --out")
    document, arrays, digest = _opened(request.run_dir)
    settings, files = _settings(document, request.data_dir), files_of(request)
    reader = image_reader("", settings)
    inputs = FileInputs(list(files), list(files.values()), reader, _numbers(settings), {})
    _refuse_shared_names(inputs.names)
    shares: dict[str, float] = {}

    def fill(folder: Path) -> None:
        network: nn.Module | None = None
        masks: list[Tensor] = []
        for batch in inputs.batches(counted(watch, len(files))):
            network = network or _network(document, settings, arrays, batch)
            masks += predicted_masks(network, batch, compute_of(settings)).unbind()
        for place, mask in zip(inputs.kept(), masks, strict=True):
            name = inputs.names[place]
            shares[name] = (mask == 1).double().mean().item()
            _write_mask(folder / _mask_name(name), mask)
        about = _about(request.run_dir, document, digest)
        (folder / "masks.json").write_text(json.dumps(about, indent=2) + "\n")
        (folder / _TABLE).write_text(_table(inputs, shares))

    build_folder(request.out, fill)
    faults = {inputs.names[place]: reason for place, reason in inputs.faults.items()}
    return MaskPredictions(request.out, shares, faults)


def _opened(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Tensor], str]:
    """Return finetune's document, and the arrays of its model with their digest."""
    try:
        document: Mapping[str, Any] = json.loads((folder / _DOCUMENT).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / _DOCUMENT} cannot be read ({error})") from None
    if document["task"] != SEGMENTATION:
        raise SettingError(
            f"{folder} holds a classifier that was fine-tuned, and masks are of --task "
            f"{SEGMENTATION}: name such a folder, or a run's"
        )
    arrays, _ = load_state(folder / "model.safetensors")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return document, tensors, state_digest(arrays, {})


def _settings(document: Mapping[str, Any], data_dir: Path | None) -> CommonSettings:
    values = dict(document["settings"])
    if data_dir is not None:
        values |= {"data-dir": str(data_dir), "cache-dir": ""}
    return build(CommonSettings, values)


def _numbers(settings: CommonSettings) -> int:
    """Return about how many numbers an image has: it bounds what is held at once."""
    return (settings.image_size or 512) ** 2


def _network(
    document: Mapping[str, Any],
    settings: CommonSettings,
    arrays: Mapping[str, Tensor],
    batch: Tensor,
) -> nn.Module:
    """Return the network for images of this shape, on the device.

    Raises:
        DataError: the images have another shape than those that it was trained on.
    """
    task = Task(tuple(batch.shape[1:]), len(document["classes"]))
    network = build_segmentation(document["network"], settings, task)
    try:
        network.load_state_dict(dict(arrays))
    except RuntimeError:
        raise DataError(
            f"images are {tuple(batch.shape[1:])}, and the network was trained on others: bring "
            f"back the declaration of data set '{settings.dataset}' that it had, or its settings"
        ) from None
    return compute_of(settings).place(network)


def _mask_name(name: str) -> str:
    """Return where an image's mask lies in the folder, and nowhere else, whatever its path says."""
    inside = os.path.normpath(f"/{name}").lstrip("/")
    return inside if inside.lower().endswith(".png") else f"{inside}.png"


def _refuse_shared_names(names: Sequence[str]) -> None:
    """Refuse images whose masks would be one file.

    Raises:
        DataError: names one of them.
    """
    first: dict[str, str] = {}
    for name in names:
        if (other := first.setdefault(_mask_name(name), name)) != name:
            raise DataError(f"the masks of '{other}' and '{name}' would be one file: rename one")


def _write_mask(path: Path, mask: Tensor) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((mask == 1).numpy().astype(np.uint8) * 255).save(path)


def _table(inputs: FileInputs, shares: Mapping[str, float]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "mask", "catheter", "fault"])
    for place, name in enumerate(inputs.names):
        if (fault := inputs.faults.get(place)) is None:
            writer.writerow([name, _mask_name(name), shares[name], ""])
        else:
            writer.writerow([name, "", "", fault])
    return text.getvalue()


def _about(folder: Path, document: Mapping[str, Any], digest: str) -> dict[str, Any]:
    return {
        "model": folder.resolve().name,
        "weights": digest,
        "network": document["network"],
        "dataset": document["dataset"],
        "settings": document["settings"],
        "columns": {
            "mask": "the PNG in this folder, 255 on the catheter, of the image as it was decoded",
            "catheter": "share of the pixels on the catheter",
            "fault": "why there is no mask",
        },
        "software": installed_software(),
    }
