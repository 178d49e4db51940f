"""Chooses the site at which a finished run's model is opened, for ``FinishedRun.model``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedsilo.core.errors import DataError, SettingError
from fedsilo.runs.trained_model import TrainedModel, open_model
from fedsilo.server_app.records.run_directory import MODEL

if TYPE_CHECKING:
    from fedsilo.runs.finished_run import FinishedRun


def model_of_site(
    run: FinishedRun, site: str, data_dir: Path | None, state_dir: Path | None, best: bool
) -> TrainedModel:
    """Open the final model with the data of ``site``; arguments and errors as ``model``."""
    lab = run.lab(site, data_dir, state_dir, best)
    whole = run.whole or run
    return open_model(lab, run.path, str(whole.summary["title"]), whole.silos, best)


def shared_model(run: FinishedRun, data_dir: Path | None, best: bool) -> TrainedModel:
    """Open the model that all sites share, with the data of the first site that is here.

    Raises:
        SettingError: each site has a model of its own.
        DataError: no site's data are on this machine.
    """
    model = None
    if best or (run.path / MODEL).is_file():
        model = _model_of_first_site(run, data_dir, best)
    if model is None or model.own:
        raise SettingError(
            f"{run.path}: with method '{run.settings.common.method}' and these settings each "
            f"site has a model of its own: name one by --site ({', '.join(run.silos)})"
        )
    return model


def _model_of_first_site(run: FinishedRun, data_dir: Path | None, best: bool) -> TrainedModel:
    """Open the model at the first site whose data are here, or raise the first site's error."""
    errors: list[DataError] = []
    for site in run.silos:
        try:
            return model_of_site(run, site, data_dir, None, best)
        except DataError as error:
            errors.append(error)
    raise errors[0]
