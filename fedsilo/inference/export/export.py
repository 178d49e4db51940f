"""``fedsilo export``: writes a finished run's model as a program, with test vectors and a card.

The folder appears complete or not at all, and only if the program's answers equal fedsilo's.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fedsilo.core.arguments import refuse_target
from fedsilo.core.errors import SettingError
from fedsilo.core.files.atomic_files import build_folder
from fedsilo.core.versions import installed_software
from fedsilo.inference.export.card import card_text
from fedsilo.inference.export.formats import (
    INPUTS,
    PROBABILITIES,
    TOLERANCE,
    Program,
    open_program,
    write_onnx,
    write_pt2,
)
from fedsilo.runs.finished_run import FinishedRun

CARD = "model-card.md"
VECTORS_FILE = "test-vectors.safetensors"
# Format -> function that writes the program
_WRITERS: Mapping[str, Callable[[Program, Path], float]] = {"pt2": write_pt2, "onnx": write_onnx}
FORMATS = tuple(_WRITERS)


@dataclass(frozen=True)
class Export:
    """The result of an export."""

    folder: Path
    difference: float  # largest difference of a probability from fedsilo's, on the test vectors
    interface: Mapping[str, Any]  # types, shapes and meanings of the inputs and outputs

    def lines(self) -> list[str]:
        """Return a summary for a terminal."""
        taken, given = self.interface["inputs"], self.interface["outputs"]
        return [
            f"takes {taken['type']} {_shape(taken)}: {taken['meaning']}",
            f"answers {_shape(given)}: {given['meaning']}",
            f"differs from fedsilo by at most {self.difference:.1e} (allowed: {TOLERANCE:g})",
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
    """Export the model that ``FinishedRun.model`` opens.

    Args:
        run_dir: the run directory.
        form: the format, one of ``FORMATS``.
        site: the site whose model is used; None for the model of all sites.
        out: the folder to write, which must not exist; None for one in the run directory.
        data_dir: the data directory; None for the run's.
        state_dir: the folder of the site's private state; None for the one in the run directory.

    Raises:
        FedsiloError: the model cannot be opened or written in this format, the program's answers
            differ, or the folder exists.
    """
    if form not in FORMATS:
        raise SettingError(f"--format must be one of {', '.join(FORMATS)}, but is '{form}'")
    name = f"export-{form}"
    if site:
        name = f"{name}-{site}"
    folder = out or run_dir / name
    refuse_target(folder, "another --out")
    run = FinishedRun.open(run_dir)
    model = run.model(site, data_dir=data_dir, state_dir=state_dir)
    # A shared model is every site's, so its card and program name no site
    own_site = None
    if model.own:
        own_site = model.site
    program, differences = open_program(model), list[float]()

    # The folder appears only once all is written and the program's answers were compared
    def fill(work: Path) -> None:
        differences.append(_WRITERS[form](program, work / f"model.{form}"))
        _write_about(program, work, own_site, differences[0])
        facts = {"weights (SHA-256)": model.weights_digest()} | installed_software()
        (work / CARD).write_text(card_text(run, own_site, form, facts))

    build_folder(folder, fill)
    return Export(folder, differences[0], program.interface())


def _write_about(program: Program, folder: Path, own_site: str | None, difference: float) -> None:
    """Write program.json, which describes inputs and outputs, and the test vectors."""
    model = program.model
    about = program.interface() | {
        "run": model.run_dir.resolve().name,
        "site": own_site,
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
