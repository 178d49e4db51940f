"""Exports a finished run's model as a program that needs no fedsilo: ``fedsilo export``.

A written program is read back, and its answers are compared with fedsilo's. The folder appears
complete or not at all, and only if the answers agree within a tolerance. Test vectors are made up,
so that no patient's row or image is exported with a model.
"""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.export import Dim, ExportedProgram

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.core.errors import ExportError, needs_extra
from fedsilo.core.files.atomic_files import build_folder
from fedsilo.core.seeding import generator
from fedsilo.core.versions import installed_software
from fedsilo.inference.export.card import card_text
from fedsilo.models.maths.standardisation import standardise
from fedsilo.models.networks.probability_model import ProbabilityModel
from fedsilo.models.tasks.task import Task
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.runs.trained_model import TrainedModel

CARD = "model-card.md"
VECTORS_FILE = "test-vectors.safetensors"
VECTORS = 8
_SIZES = (VECTORS, 1, 3)  # batch sizes that a program is tested with
# The largest allowed difference of an answer; a numeric outcome's is counted in its standard
# deviations
TOLERANCE = 1e-4
INPUTS = "inputs"
_CPU = Compute(torch.device("cpu"), bf16=False)


@dataclass(frozen=True)
class Program:
    """A model on the CPU, ready to be exported, with test vectors and fedsilo's answers."""

    model: TrainedModel
    module: ProbabilityModel  # maps inputs to the task's predictions
    vectors: Tensor  # (8, *input_shape), made-up inputs
    answers: Tensor  # (8, ...), fedsilo's own predictions for them, without dropout

    @property
    def task(self) -> Task:
        """The run's task, which says what the answers are."""
        return self.model.lab.task

    def difference(self, answers: Tensor, count: int = VECTORS) -> float:
        """Compare an exported program's answers with fedsilo's on the first ``count`` test vectors.

        Args:
            answers: the program's answers (count, ...) to these test vectors.
            count: the number of test vectors to compare.

        Returns:
            The largest absolute difference over all elements. For a numeric outcome, differences
            are divided by the standard deviation of the outcome over the training samples.

        Raises:
            ExportError: the result would be above 0.0001, or NaN.
        """
        _, deviation = self.task.scale
        apart = (answers.double() - self.answers[:count].double()).abs()
        most = (apart / deviation).max().item()
        # Not `most > TOLERANCE`, which would accept NaN
        if not most <= TOLERANCE:
            raise ExportError(
                f"the exported program's answers differ by {most:.2g} from fedsilo's, but only "
                f"{TOLERANCE:g} is allowed: nothing was written; report it with the versions of "
                "'fedsilo settings'"
            )
        return most

    def interface(self) -> dict[str, Any]:
        """Describe the program's inputs and outputs for program.json.

        Each has a name, a type, a shape and a meaning. The batch size is given as "batch", because
        it may vary. The outputs also list the names of the classes, or of the outcomes. For a
        table, the inputs also list the names of the features in order.
        """
        silo, pixels = self.model.silo, self.model.pixel_standardisation()
        inputs = {
            "name": INPUTS,
            "type": str(self.vectors.dtype).removeprefix("torch."),
            "shape": ["batch", *self.vectors.shape[1:]],
            "meaning": _meaning(self.vectors, pixels is not None),
        }
        if silo.features:
            inputs["features"] = list(silo.features)
        return {
            "inputs": inputs,
            "outputs": {
                "name": self.task.output_name,
                "type": "float32",
                "shape": ["batch", *self.answers.shape[1:]],
                "classes": list(self.model.classes),
                "meaning": f"{self.task.output_meaning}, by one pass without dropout",
            },
        }


def open_program(model: TrainedModel) -> Program:
    """Prepare a model for export: a copy on the CPU that takes raw inputs and returns predictions.

    The result also has eight made-up test vectors, and fedsilo's own predictions for them. The
    exported program's predictions are later compared with these.
    """
    # A copy, because the caller may go on with the model on its own device
    network = copy.deepcopy(model.network).cpu()
    module = ProbabilityModel(
        network, model.silo.standardisation, model.pixel_standardisation(), model.lab.task
    )
    module.requires_grad_(False)
    vectors = made_up_inputs(model)
    # Prepared by the silo's code, not the module's, because the two answers are compared
    outputs = over_batches(network, _prepare(model, vectors), _CPU, network)
    return Program(model, module, vectors, model.lab.task.predict(outputs).float())


def made_up_inputs(model: TrainedModel) -> Tensor:
    """Make up eight inputs, with which an exported program is compared.

    The inputs come from no patient, and are the same in every call:

    - The rows of a table are normally distributed, with the mean and the standard deviation of each
      feature. The first value of the first row is missing (NaN).
    - Images of type uint8 or int16 are uniform noise over the whole range of the type.
    - Floating-point images are uniform noise from 0 to 255.

    Returns:
        The inputs, (8, *input_shape).
    """
    rng, inputs = generator(0, "export-vectors"), model.silo.train.inputs
    shape = (VECTORS, *model.silo.shape.input_shape)
    standardisation = model.silo.standardisation
    if standardisation:
        spread = torch.randn(shape, generator=rng, dtype=torch.float64)
        mean = torch.from_numpy(standardisation.mean)
        rows = (mean + spread * torch.from_numpy(standardisation.std)).float()
        # One missing value, so that the comparison covers the replacement by the mean
        rows[0, 0] = torch.nan
        return rows
    if inputs.dtype in (torch.uint8, torch.int16):
        kinds = torch.iinfo(inputs.dtype)
        return torch.randint(kinds.min, kinds.max + 1, shape, generator=rng).to(inputs.dtype)
    return 255 * torch.rand(shape, generator=rng)


def _prepare(model: TrainedModel, vectors: Tensor) -> Tensor:
    """Prepare raw inputs for the network in the way in which sites prepare their samples.

    fedsilo computes its own predictions from the result. An exported program prepares raw inputs
    itself, so a comparison of the predictions also tests this preparation.

    Rows of a table are standardised. If the data set standardises pixels by a fixed mean and
    deviation, images are divided by 255 and then standardised. All other images are returned
    unchanged.
    """
    if model.silo.standardisation:
        return standardise(vectors, model.silo.standardisation)
    pixels = model.pixel_standardisation()
    if pixels:
        mean, scale = pixels
        return (vectors / 255 - mean) / scale
    return vectors


def _meaning(vectors: Tensor, is_standardised: bool) -> str:
    """Describe in a phrase the inputs that an exported program takes, for program.json.

    The phrase depends on the shape and type of ``vectors``, which are example inputs. It tells
    tables from images, and gives the range of the pixels. For floating-point images that are not
    standardised, the phrase adds that the pixels are used as they are read. For all other inputs,
    ``is_standardised`` is ignored.
    """
    if vectors.ndim == 2:
        return "a table's features in this order as they are read; a missing value is NaN"
    if vectors.dtype == torch.uint8:
        return "pixels 0 to 255, decoded and of this size"
    if vectors.dtype == torch.int16:
        return "pixels of 16 bits less 32768, decoded and of this size"
    if is_standardised:
        return "pixels 0 to 255, of this size"
    return "pixels 0 to 255, of this size, as they are read"


def trace_program(program: Program) -> ExportedProgram:
    """Trace the program by torch.export for batches of any size.

    Raises:
        ExportError: torch cannot trace a part of the network.
    """
    batch = {INPUTS: {0: Dim("batch", min=1)}}
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(program.module, (program.vectors,), dynamic_shapes=batch)
    # The tracer raises errors of nearly any type
    except Exception as error:
        raise ExportError(_cannot("pt2", error)) from error


def write_pt2(program: Program, path: Path) -> float:
    """Write the program as a PyTorch file, load the file, and compare its answers with fedsilo's.

    The answers are compared for batches of 8, 1 and 3 test vectors.

    Returns:
        The largest absolute difference in all batches. For a numeric outcome, it is divided by the
        standard deviation of the outcome.

    Raises:
        ExportError: the program cannot be traced, or a difference is above 0.0001 or NaN.
    """
    with _quiet():
        torch.export.save(trace_program(program), path)
        read: Any = torch.export.load(path).module()
    differences = []
    with torch.no_grad():
        for size in _SIZES:
            differences.append(program.difference(read(program.vectors[:size]), size))
    return max(differences)


def write_onnx(program: Program, path: Path) -> float:
    """Write the program as an ONNX file, and compare its answers with fedsilo's.

    ONNX Runtime loads the written file and computes the answers for batches of 8, 1 and 3 test
    vectors.

    Returns:
        The largest absolute difference in all batches. For a numeric outcome, it is divided by the
        standard deviation of the outcome.

    Raises:
        SettingError: the extra 'onnx' is not installed.
        ExportError: the program cannot be exported, or a difference is above 0.0001 or NaN.
    """
    # Imported first, so that a missing package is named before the slow trace begins
    with needs_extra("format 'onnx'", "onnx"):
        import onnxruntime
        import onnxscript  # noqa: F401  # torch's ONNX exporter needs it
    traced = trace_program(program)
    try:
        with torch.no_grad(), _quiet():
            torch.onnx.export(
                traced,
                (program.vectors,),
                path,
                input_names=[INPUTS],
                output_names=[program.task.output_name],
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        # The written file is read again by the runtime that its users will use
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        answers = []
        for size in _SIZES:
            inputs = {INPUTS: program.vectors[:size].numpy()}
            answers.append(session.run([program.task.output_name], inputs)[0])
    # Converter and runtime raise errors of nearly any type
    except Exception as error:
        raise ExportError(_cannot("onnx", error)) from error
    differences = []
    for answer, size in zip(answers, _SIZES, strict=True):
        differences.append(program.difference(torch.from_numpy(answer), size))
    return max(differences)


def _cannot(name: str, error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"this model cannot be written as '{name}' ({text}): choose another --format"


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporters' warnings, and log messages below the level ERROR, while the block runs.

    Users cannot act on these messages.
    """
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


# Format -> function that writes the program
_WRITERS: Mapping[str, Callable[[Program, Path], float]] = {"pt2": write_pt2, "onnx": write_onnx}
FORMATS = tuple(_WRITERS)


@dataclass(frozen=True)
class Export:
    """The result of an export: the folder, the largest difference, and the program's interface."""

    folder: Path
    difference: float  # largest difference of an answer from fedsilo's, on the test vectors
    interface: Mapping[str, Any]  # types, shapes and meanings of the inputs and outputs

    def lines(self) -> list[str]:
        """Return four lines for a terminal: the inputs, outputs, largest difference and folder."""
        taken, given = self.interface["inputs"], self.interface["outputs"]
        return [
            f"takes {taken['type']} {_shape(taken)}: {taken['meaning']}",
            f"answers {_shape(given)}: {given['meaning']}",
            f"differs from fedsilo by at most {self.difference:.1e} (allowed: {TOLERANCE:g})",
            str(self.folder),
        ]


def export_model(run: FinishedRun, model: TrainedModel, form: str, folder: Path) -> Export:
    """Write a model as a program to a new folder, with test vectors and a model card.

    The folder appears only when all its files are written, and when the program's answers to the
    test vectors agree with fedsilo's.

    Args:
        run: the run of the model.
        model: the model.
        form: the format, 'pt2' (PyTorch) or 'onnx'.
        folder: the folder to write. The caller must check that it does not exist. If another
            process fills it meanwhile, its files stay, the export is discarded, and no error is
            raised.

    Raises:
        SettingError: the format is 'onnx', but the extra 'onnx' is not installed.
        ExportError: the model cannot be written in this format, or the program's answers differ
            from fedsilo's by more than 0.0001.
    """
    # A shared model belongs to all sites, so its card and program name no site
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
    """Write program.json and test-vectors.safetensors into ``folder``.

    program.json describes the inputs, the outputs and the origin of the model. It also has the
    largest difference that was measured, and the largest one that is allowed.
    test-vectors.safetensors has the test vectors and fedsilo's answers.

    Args:
        program: the prepared model.
        folder: an existing folder.
        own_site: the site that the model belongs to; None for a model that all sites share.
        difference: the largest measured difference of an answer.
    """
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
    tensors = {
        INPUTS: program.vectors.contiguous(),
        program.task.output_name: program.answers.contiguous(),
    }
    save_file(tensors, folder / VECTORS_FILE)


def _shape(side: Mapping[str, Any]) -> str:
    return "(" + ", ".join(map(str, side["shape"])) + ")"
