"""``fedsilo export``: a finished run's model as one program, with test vectors and a model card.

The folder is written at once, and only if the program answers as fedsilo does.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fedsilo.datasets.io.atomic_files import build_folder
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.versions import installed_software
from fedsilo.server_app.studies.export.card import card_text
from fedsilo.server_app.studies.export.formats import (
    INPUTS,
    PROBABILITIES,
    TOLERANCE,
    Program,
    open_program,
    write_onnx,
    write_pt2,
)
from fedsilo.server_app.studies.finetune.request import refuse_target
from fedsilo.server_app.studies.predict.model import open_model

CARD = "model-card.md"
VECTORS_FILE = "test-vectors.safetensors"
# By format, what writes the program
_WRITERS: Mapping[str, Callable[[Program, Path], float]] = {"pt2": write_pt2, "onnx": write_onnx}
FORMATS = tuple(_WRITERS)


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
    """Export the model that ``open_model`` opens as ``form``, one of ``FORMATS``.

    ``out`` is the folder to write, which must not exist, or None for one in the run directory.

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
        differences.append(_WRITERS[form](program, work / f"model.{form}"))
        _write_about(program, work, differences[0])
        facts = {"weights (SHA-256)": model.weights_digest()} | installed_software()
        text = card_text(model.run, site if model.own else None, form, facts)
        (work / CARD).write_text(text)

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
