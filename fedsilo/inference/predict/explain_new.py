"""``fedsilo explain --table`` and ``--image``: explains a model's prediction for a new case."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedsilo.core.errors import DataError, SettingError
from fedsilo.datasets.images.decoding import BrokenImageError
from fedsilo.datasets.registry import image_reader
from fedsilo.datasets.silo.silos import Split
from fedsilo.explanations.sample import explain_case
from fedsilo.inference.predict.inputs import table_inputs
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.runs.trained_model import TrainedModel, refuse_table_or_images

if TYPE_CHECKING:
    from fedsilo.explanations.sample import Explanation


def explain_new(
    run_dir: Path,
    site: str,
    table: Path | None = None,
    row: int = 0,
    image: Path | None = None,
    data_dir: Path | None = None,
    state_dir: Path | None = None,
) -> Explanation:
    """Explain the prediction of a finished run's model for one new case.

    The case is a row of a table, counted from 0, or an image; both as ``predict`` takes them. The
    site's data must be on this machine.

    Raises:
        SettingError: a table and an image are given.
        DataError: the row or the image cannot be used.
    """
    if table is not None and image is not None:
        raise SettingError(
            "an explanation is for one case, but --table and --image are given: remove one"
        )
    model = FinishedRun.open(run_dir).model(site, data_dir=data_dir, state_dir=state_dir)
    refuse_table_or_images(model, table=table is not None)
    if table:
        case = _read_row(model, table, row)
        name = f"{table.name}, row {row}"
    else:
        path = image or Path()
        case = _read_image(model, path)
        name = path.name
    # The label is unknown, and no explanation of a new case shows it
    cases = Split(case[None], torch.zeros(1, dtype=torch.int64))
    return explain_case(model.lab, model.network, cases, 0, f"{site}, {name}")


def _read_row(model: TrainedModel, table: Path, row: int) -> torch.Tensor:
    inputs = table_inputs(model, table, None)
    if not 0 <= row < len(inputs.names):
        raise DataError(
            f"{table} has {len(inputs.names)} rows, counted from 0: there is no row {row}"
        )
    if row in inputs.faults:
        raise DataError(f"{table}, line {inputs.names[row]}: {inputs.faults[row]}")
    return inputs.inputs[inputs.kept().index(row)]


def _read_image(model: TrainedModel, path: Path) -> torch.Tensor:
    try:
        return torch.from_numpy(image_reader(model.site, model.common)(path))
    except BrokenImageError as error:
        raise DataError(f"{path} {error}") from None
