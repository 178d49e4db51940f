"""Adds groups of patients and the decision curve to the clinic report; needs the sites' data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import SERVER
from fedsilo.inference.monitor.decisions import examine_decisions
from fedsilo.inference.monitor.groups import Examined, GroupColumn, examine_groups
from fedsilo.inference.predict.inputs import open_inputs, table_schema
from fedsilo.inference.predict.predict_request import CaseSource
from fedsilo.inference.predict.prediction import predict_inputs
from fedsilo.reports.clinic import Examination
from fedsilo.runs.finished_run import Shown
from fedsilo.runs.trained_model import TrainedModel

_TITLE = "Groups of patients, and decisions"


def examine(
    run: Shown, by: Sequence[str], decisions: bool, data_dir: Path | None
) -> list[Examination]:
    """Return a section for each column of ``by``, and one of the decision curve.

    Raises:
        SettingError: a column is not one of the run's table.
        FedsiloError: the data or a model cannot be opened.
    """
    level = run.settings.common.trust
    if level != SERVER:
        why = f"At 'trust: {level}' no metrics of patient groups leave a site, so none are shown."
        return [Examination(_TITLE, [why])]
    sites = [site for site in run.silos if site not in run.withheld]
    if not sites:
        why = f"Every site has a class with fewer than {run.floor} test patients."
        return [Examination(_TITLE, [why])]
    models = [run.model(site, data_dir=data_dir) for site in sites]
    columns = [_column(models[0], name) for name in by]
    found = _together(run, models)
    answers = [examine_groups(found, column) for column in columns]
    if decisions:
        answers.append(examine_decisions(found))
    return answers


def _together(run: Shown, models: Sequence[TrainedModel]) -> Examined:
    probabilities, labels, rows = [], [], []
    for model in models:
        inputs = open_inputs(model, CaseSource("split", "test"))
        probabilities.append(predict_inputs(model, inputs).own)
        labels.append(model.samples("test").labels)
        if (read := inputs.read) is not None:
            rows.append(read)
    return Examined(
        sites=[model.site for model in models],
        classes=models[0].classes,
        floor=run.floor,
        probabilities=torch.cat(probabilities),
        labels=torch.cat(labels),
        rows=torch.cat(rows) if rows else None,
    )


def _column(model: TrainedModel, name: str) -> GroupColumn:
    """Return a column of the run's table, and where its values are among the features."""
    if not model.silo.features:
        raise SettingError(
            f"--by '{name}' names a column of a table, but the run's data are images: remove --by"
        )
    features, schema = model.silo.features, table_schema(model)
    columns = {column.name: column for column in schema.columns if column.kind != "ignored"}
    if name not in columns:
        raise SettingError(
            f"--by must be a column of the table ({', '.join(columns)}), but is '{name}'"
        )
    places = [n for n, one in enumerate(features) if one == name or one.startswith(f"{name}=")]
    levels = tuple(columns[name].levels)
    return GroupColumn(name, places, levels, () if levels else columns[name].survey_edges())
