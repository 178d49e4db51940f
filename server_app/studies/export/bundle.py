"""A MONAI bundle: the program, how MONAI's own commands run it, and what its metadata must say."""

from __future__ import annotations

import json
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
# Read by MONAI in a process that need not know fedsilo
_NETWORK = '''\
"""The exported program as a module: MONAI calls eval(), which a program has no need of."""

import torch


class ExportedProgram(torch.nn.Module):
    """Maps samples to class probabilities."""

    def __init__(self, file):
        super().__init__()
        self.program = torch.export.load(file).module()

    def train(self, mode=True):
        """Leave the program as it is: it was exported for inference."""
        return self

    def forward(self, inputs):
        """Map (batch, channels, height, width) to (batch, classes)."""
        return self.program(inputs)
'''


def write_bundle(program: Program, folder: Path) -> float:
    """Write the bundle's folder; return how far the program's answers are from ours, at most.

    Raises:
        ExportError: the model is of a table, the extra is not installed, or the program answers
            otherwise.
    """
    if program.vectors.ndim != 4:
        raise ExportError(
            "format 'monai' is of images, and the run's data set is a table: choose pt2 or onnx"
        )
    try:
        monai = version("monai")
    except ModuleNotFoundError:
        raise ExportError(
            "format 'monai' needs the extra of that name: pip install 'fedsilo[monai]'"
        ) from None
    for name in ("configs", "models", "docs", "scripts"):
        (folder / name).mkdir()
    difference = write_pt2(program, folder / "models" / "model.pt2")
    with quiet():
        torch.save(dict(exported(program).state_dict), folder / "models" / "model.pt")
    (folder / "scripts" / "__init__.py").write_text('"""What this bundle runs by."""\n')
    (folder / "scripts" / "network.py").write_text(_NETWORK)
    for name, content in (("metadata", _metadata(program, monai)), ("inference", _INFERENCE)):
        (folder / "configs" / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
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
    deep = kind == torch.int16
    return {
        "type": "image",
        "format": "RGB" if channels == 3 else "magnitude",
        "modality": "n/a",
        "num_channels": channels,
        "spatial_shape": [height, width],
        "dtype": str(kind).removeprefix("torch."),
        "value_range": [-32768, 32767] if deep else [0, 255],
        "is_patch_data": False,
        "channel_def": {str(place): name for place, name in enumerate(("R", "G", "B")[:channels])}
        if channels == 3
        else {"0": "image"},
    }


_INFERENCE: dict[str, Any] = {
    "imports": ["$import glob", "$import json", "$import numpy", "$import torch"],
    "bundle_root": ".",
    "input_dir": "$@bundle_root + '/inputs'",
    "device": "$torch.device('cpu')",
    "network_def": {
        "_target_": "scripts.network.ExportedProgram",
        "file": "$@bundle_root + '/models/model.pt2'",
    },
    "network": "$@network_def.to(@device)",
    "files": "$sorted(glob.glob(@input_dir + '/*.npy'))",
    "load": "$lambda file: torch.from_numpy(numpy.load(file))[None].to(@device)",
    "answers": "${file: @network(@load(file))[0].tolist() for file in @files}",
    "run": ["$print(json.dumps(@answers, indent=2))"],
}
