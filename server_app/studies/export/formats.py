"""The formats of an exported program; each is read back and compared with our own answers."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from fedsilo.models.contract.errors import ExportError, needs_extra
from fedsilo.server_app.studies.export.program import INPUTS, PROBABILITIES, VECTORS, Program

_SIZES = (VECTORS, 1, 3)  # sizes of batches that a program is tried with


def exported(program: Program) -> ExportedProgram:
    """Return the program as torch.export has it, for batches of any size.

    Raises:
        ExportError: the network holds something that cannot be exported.
    """
    batch = {INPUTS: {0: Dim("batch", min=1)}}
    try:
        with torch.no_grad(), quiet():
            return torch.export.export(program.module, (program.vectors,), dynamic_shapes=batch)
    except Exception as error:  # the tracer raises nearly anything
        raise ExportError(_cannot("pt2", error)) from error


def write_pt2(program: Program, path: Path) -> float:
    """Write the program for PyTorch, and return the largest difference of its answers from ours.

    Raises:
        ExportError: it cannot be exported, or the difference is too large.
    """
    with quiet():
        torch.export.save(exported(program), path)
        read: Any = torch.export.load(path).module()
    with torch.no_grad():
        return max(program.difference(read(program.vectors[:n]), n) for n in _SIZES)


def write_onnx(program: Program, path: Path) -> float:
    """Write the program for ONNX runtimes; returns and raises as ``write_pt2``.

    Raises:
        SettingError: the extra 'onnx' is not installed.
        ExportError: as ``write_pt2``.
    """
    with needs_extra("format 'onnx'", "onnx"):
        import onnxruntime
        import onnxscript  # noqa: F401  # torch's ONNX exporter needs it
    try:
        with torch.no_grad(), quiet():
            torch.onnx.export(
                exported(program),
                (program.vectors,),
                path,
                input_names=[INPUTS],
                output_names=[PROBABILITIES],
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        answers = [
            session.run([PROBABILITIES], {INPUTS: program.vectors[:n].numpy()})[0] for n in _SIZES
        ]
    except ExportError:
        raise
    except Exception as error:  # the converter and the runtime raise nearly anything
        raise ExportError(_cannot("onnx", error)) from error
    pairs = zip(answers, _SIZES, strict=True)
    return max(program.difference(torch.from_numpy(answer), n) for answer, n in pairs)


def _cannot(name: str, error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"this model cannot be written as '{name}' ({text}): choose another --format"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' own messages, which are for their authors, off the terminal."""
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
