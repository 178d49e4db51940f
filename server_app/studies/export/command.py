"""``fedsilo export``: a finished run's model as one program, with test vectors and a model card.

The folder is written at once, and only if the program answers as fedsilo does.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fedsilo.datasets.io.atomic_files import build_folder
from fedsilo.models.contract.errors import ExportError, SettingError, needs_extra
from fedsilo.models.contract.versions import FEDSILO, installed_software
from fedsilo.server_app.studies.export.card import card_text
from fedsilo.server_app.studies.export.formats import exported, quiet, write_onnx, write_pt2
from fedsilo.server_app.studies.export.program import (
    INPUTS,
    PROBABILITIES,
    TOLERANCE,
    Program,
    open_program,
)
from fedsilo.server_app.studies.finetune.request import refuse_target
from fedsilo.server_app.studies.predict.model import open_model

CARD = "model-card.md"
FORMATS = ("pt2", "onnx", "monai")
VECTORS_FILE = "test-vectors.safetensors"
_WRITERS: Mapping[str, tuple[str, Callable[[Program, Path], float]]] = {
    "pt2": ("model.pt2", write_pt2),
    "onnx": ("model.onnx", write_onnx),
}


@dataclass(frozen=True)
class Export:
    """What was exported."""

    folder: Path
    difference: float  # the largest, of its probabilities from fedsilo's on the test vectors
    interface: Mapping[str, Any]  # what the program takes and returns

    def lines(self) -> list[str]:
        """Return a summary for a terminal."""
        taken, given = self.interface["inputs"], self.interface["outputs"]
        return [
            f"takes {taken['type']} {_shape(taken)}: {taken['meaning']}",
            f"answers {_shape(given)}: {given['meaning']}",
            f"differs from fedsilo's own by {self.difference:.1e} at most ({TOLERANCE:g} allowed)",
            str(self.folder),
        ]


def export(
    run_dir: Path,
    form: str = "pt2",
    site: str | None = None,
    out: Path | None = None,
    data_dir: Path | None = None,
    state_dir: Path | None = None,
) -> Export:
    """Export a finished run's model.

    Args:
        run_dir: the run directory.
        form: one of ``FORMATS``.
        site: whose model, or None for that of all sites.
        out: the folder to write, which must not exist, or None for one in the run directory.
        data_dir: the data directory, or None for the run's own.
        state_dir: the site's private state, or None for the run directory's.

    Raises:
        FedsiloError: the model cannot be opened or written in this form, the program answers
            differently, or the folder exists already.
    """
    if form not in FORMATS:
        raise SettingError(f"--format is '{form}'; it must be one of {', '.join(FORMATS)}")
    folder = out or run_dir / f"export-{form}{f'-{site}' if site else ''}"
    refuse_target(folder, "another --out")
    model = open_model(run_dir, site, data_dir, state_dir)
    program, differences = open_program(model), list[float]()

    def fill(work: Path) -> None:
        if form == "monai":
            differences.append(write_bundle(program, work))
            card_at = work / "docs" / "README.md"
        else:
            name, write = _WRITERS[form]
            differences.append(write(program, work / name))
            card_at = work / CARD
        _write_about(program, work, differences[0])
        facts = {"weights (SHA-256)": model.weights_digest()} | installed_software()
        card_at.write_text(card_text(model.run, site if model.own else None, form, facts))

    build_folder(folder, fill)
    return Export(folder, differences[0], program.interface())


def _write_about(program: Program, folder: Path, difference: float) -> None:
    """Write what goes in and out, and the vectors that show whether a program works."""
    model = program.model
    about = program.interface() | {
        "run": model.run.path.resolve().name,
        "site": model.site if model.own else None,
        "weights": model.weights_digest(),
        "test vectors": {
            "file": VECTORS_FILE,
            "made up": "no patient's sample is among them",
            "largest difference": difference,
            "allowed": TOLERANCE,
        },
        "software": installed_software(),
    }
    (folder / "program.json").write_text(json.dumps(about, indent=2) + "\n")
    tensors = {INPUTS: program.vectors.contiguous(), PROBABILITIES: program.answers.contiguous()}
    save_file(tensors, folder / VECTORS_FILE)


def _shape(side: Mapping[str, Any]) -> str:
    return "(" + ", ".join(map(str, side["shape"])) + ")"


_SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
    "meta_schema_20240725.json"
)
_FILES = Path(__file__).parent / "templates" / "monai"


def write_bundle(program: Program, folder: Path) -> float:
    """Write the bundle's folder, and return the largest difference of its answers from ours.

    Raises:
        SettingError: the extra 'monai' is not installed.
        ExportError: the model is of a table, or the difference is too large.
    """
    if program.vectors.ndim != 4:
        raise ExportError(
            "format 'monai' is for images, and the run's data set is a table: choose pt2 or onnx"
        )
    with needs_extra("format 'monai'", "monai"):
        monai = version("monai")
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
