"""Shows the results of the commands that apply a model: on the terminal, as JSON and in files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsilo.api.options import MaybePath
from fedsilo.cli.printing import AsJson, print_json, print_result
from fedsilo.core.arguments import AnyPath

if TYPE_CHECKING:
    from fedsilo.finetuning.finetune_results import FinetuneResult
    from fedsilo.inference.monitor.monitor import Monitored
    from fedsilo.inference.predict.answers import Predictions
    from fedsilo.inference.predict.calibration import Calibration
    from fedsilo.inference.predict.predicted_masks import MaskPredictions


def finetune(result: FinetuneResult, *, out: AnyPath, as_json: AsJson = False) -> None:
    """Print the result of fine-tuning.

    By default, this is a table with a row for each starting point (the weights from which networks
    are trained), then the output folder. With ``as_json``, it is a JSON list with the mean and
    deviation over seeds of each metric, for each starting point.
    """
    from fedsilo.finetuning.finetune_results import metrics_table, result_table

    if as_json:
        print_json(metrics_table(result.study, result.starts).to_dict("records"))
        return
    print_result([result_table(result), str(out)])


def predict(
    result: Predictions | MaskPredictions,
    *,
    out: AnyPath | None = None,
    html: AnyPath | None = None,
    as_json: AsJson = False,
) -> None:
    """Print a summary of the predictions and the paths of the written files, or only JSON.

    Nothing is written here: ``out`` and ``html`` are files that the prediction has written. For
    masks, the summary names their folder, so ``out`` is not printed again. JSON has a record for
    each input, with the columns of the CSV file.

    Raises:
        typer.Exit: an input could not be read, so it has no prediction or mask. The exit code is 3.
            Everything is printed first.
    """
    if as_json:
        print_json(result.frame().to_dict("records"))
    else:
        files = [out, html]
        if not hasattr(result, "inputs"):
            files = [html]  # the summary of masks ends with their folder
        print_result(result)
        print_result([path for path in files if path is not None])
    if result.faults:
        raise typer.Exit(3)


def calibrate(
    result: Calibration, *, run_dir: AnyPath, coverage: float, out: AnyPath | None = None
) -> None:
    """Print a summary of a calibration, then the path of its file.

    The summary describes prediction sets with ``coverage``. The path is ``out``. If ``out`` is
    None, it is the default file in ``run_dir``.
    """
    from fedsilo.inference.predict.calibration import calibration_path

    print_result([*result.lines(coverage), out or calibration_path(Path(run_dir), result.site)])


def monitor(
    result: Monitored,
    *,
    out: Annotated[MaybePath, "also write a page"] = None,
    overwrite: Annotated[bool, "replace existing files"] = False,
    as_json: AsJson = False,
) -> None:
    """Print the checks on new cases, as text or as JSON, and write a page about them.

    The page is an HTML file, and is written only if ``out`` is given. An existing file is replaced
    only with ``overwrite``. The path of the page is printed too, unless ``as_json`` is set.

    Raises:
        FedsiloError: the file ``out`` exists, and ``overwrite`` is False.
        typer.Exit: a check is beyond its limit. The exit code is 3. Everything is printed and
            written first.
    """
    from fedsilo.inference.monitor.monitor import ALARM
    from fedsilo.pages.page import write_page

    if as_json:
        print_json(result.document())
    else:
        print_result(result)
    if out is not None:
        page = write_page(Path(out), result.page, overwrite=overwrite)
        if not as_json:
            print_result(page)
    if result.alarms:
        raise typer.Exit(ALARM)
