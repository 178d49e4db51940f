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
    # The level is checked before any data are opened
    level = run.settings.common.trust
    if level != SERVER:
        why = f"At 'trust: {level}' no metrics of patient groups leave a site, so none are shown."
        return [Examination(_TITLE, [why])]
    # A site with hidden counts is left out, because the pooled counts would reveal them
    sites = [site for site in run.silos if site not in run.withheld]
    if not sites:
        why = f"Every site has a class with fewer than {run.floor} test patients."
        return [Examination(_TITLE, [why])]
    models = [run.model(site, data_dir=data_dir) for site in sites]
    columns = [_column(models[0], name) for name in by]
    found = _pool_predictions(run, models)
    sections = [examine_groups(found, column) for column in columns]
    if decisions:
        sections.append(examine_decisions(found))
    return sections


def _pool_predictions(run: Shown, models: Sequence[TrainedModel]) -> Examined:
    """Predict the test samples of each model's site, and put them together."""
    probabilities, labels, rows = [], [], []
    for model in models:
        inputs = open_inputs(model, CaseSource("split", "test"))
        probabilities.append(predict_inputs(model, inputs).own)
        labels.append(model.samples("test").labels)
        if inputs.read is not None:
            rows.append(inputs.read)
    all_rows = None
    if rows:
        all_rows = torch.cat(rows)
    return Examined(
        sites=[model.site for model in models],
        classes=models[0].classes,
        floor=run.floor,
        probabilities=torch.cat(probabilities),
        labels=torch.cat(labels),
        rows=all_rows,
    )


def _column(model: TrainedModel, name: str) -> GroupColumn:
    """Find a column of the run's table and the places of its values among the features.

    Raises:
        SettingError: the run's data are images, or the table has no such column.
    """
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
    places = []
    for place, feature in enumerate(features):
        if feature == name or feature.startswith(f"{name}="):
            places.append(place)
    levels = tuple(columns[name].levels)
    edges: Sequence[float] = ()
    if not levels:
        edges = columns[name].survey_edges()
    return GroupColumn(name, places, levels, edges)
