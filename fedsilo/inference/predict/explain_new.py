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
from fedsilo.runs.trained_model import (
    TrainedModel,
    refuse_table_or_images,
)

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

    The case is a row, from 0, of a table as ``predict`` takes them, or an image. The site's data
    must be here.

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
    found = _row(model, table, row) if table else _image(model, image or Path())
    name = f"{table.name}, row {row}" if table else (image or Path()).name
    cases = Split(found[None], torch.zeros(1, dtype=torch.int64))
    return explain_case(model.lab, model.network, cases, 0, f"{site}, {name}")


def _row(model: TrainedModel, table: Path, row: int) -> torch.Tensor:
    inputs = table_inputs(model, table, None)
    if not 0 <= row < len(inputs.names):
        raise DataError(
            f"{table} has {len(inputs.names)} rows, counted from 0: there is no row {row}"
        )
    if row in inputs.faults:
        raise DataError(f"{table}, line {inputs.names[row]}: {inputs.faults[row]}")
    return inputs.inputs[inputs.kept().index(row)]


def _image(model: TrainedModel, path: Path) -> torch.Tensor:
    try:
        return torch.from_numpy(image_reader(model.site, model.common)(path))
    except BrokenImageError as error:
        raise DataError(f"{path} {error}") from None
