"""A MONAI bundle: the program, the configuration of MONAI's own commands, and the metadata."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedsilo.models.contract.errors import ExportError
from fedsilo.models.contract.versions import FEDSILO
from fedsilo.server_app.studies.export.formats import exported, quiet, write_pt2
from fedsilo.server_app.studies.export.program import Program

_SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
    "meta_schema_20240725.json"
)
_FILES = Path(__file__).parent / "templates" / "monai"


def write_bundle(program: Program, folder: Path) -> float:
    """Write the bundle's folder, and return the largest difference of its answers from ours.

    Raises:
        ExportError: the model is of a table, the extra is not installed, or the difference is too
            large.
    """
    if program.vectors.ndim != 4:
        raise ExportError(
            "format 'monai' is for images, and the run's data set is a table: choose pt2 or onnx"
        )
    try:
        monai = version("monai")
    except ModuleNotFoundError:
        raise ExportError(
            "format 'monai' needs the extra of that name: pip install 'fedsilo[monai]'"
        ) from None
    configs, models, scripts = (folder / name for name in ("configs", "models", "scripts"))
    for made in (configs, models, scripts, folder / "docs"):
        made.mkdir()
    difference = write_pt2(program, models / "model.pt2")
    with quiet():
        torch.save(dict(exported(program).state_dict), models / "model.pt")
    (scripts / "__init__.py").touch()
    shutil.copyfile(_FILES / "network.py.txt", scripts / "network.py")  # it does not need fedsilo
    shutil.copyfile(_FILES / "inference.json", configs / "inference.json")
    (configs / "metadata.json").write_text(json.dumps(_metadata(program, monai), indent=2) + "\n")
    return difference


def _metadata(program: Program, monai: str) -> dict[str, Any]:
    run, classes = program.model.run, program.model.classes
    title, dataset = run.summary["title"], run.summary["dataset"]
    today = datetime.now(UTC).date().isoformat()
    return {
        "schema": _SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported by fedsilo {FEDSILO} on {today}"},
        "monai_version": monai,
        "pytorch_version": torch.__version__,
        "numpy_version": version("numpy"),
        "required_packages_version": {},
        "name": run.path.resolve().name,
        "task": f"classification of {dataset}",
        "description": f"{title} at {len(run.silos)} sites on {dataset}; see docs/README.md",
        "authors": "to be written by a person",
        "copyright": "to be written by a person",
        "intended_use": "to be written by a person; not for clinical use",
        "network_data_format": {
            "inputs": {"image": _image(program)},
            "outputs": {
                "pred": {
                    "type": "probabilities",
                    "format": "classes",
                    "num_channels": len(classes),
                    "spatial_shape": [],
                    "dtype": "float32",
                    "value_range": [0, 1],
                    "is_patch_data": False,
                    "channel_def": {str(place): name for place, name in enumerate(classes)},
                }
            },
        },
    }


def _image(program: Program) -> dict[str, Any]:
    channels, height, width = program.vectors.shape[1:]
    kind = program.vectors.dtype
    names = ("R", "G", "B") if channels == 3 else ("image",)
    return {
        "type": "image",
        "format": "RGB" if channels == 3 else "magnitude",
        "modality": "n/a",
        "num_channels": channels,
        "spatial_shape": [height, width],
        "dtype": str(kind).removeprefix("torch."),
        "value_range": [-32768, 32767] if kind == torch.int16 else [0, 255],
        "is_patch_data": False,
        "channel_def": {str(place): name for place, name in enumerate(names)},
    }
