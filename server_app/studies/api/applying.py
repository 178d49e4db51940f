"""Applies the model of a finished run: fine-tune, predict, calibrate, monitor, export, card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedsilo.server_app.config.trusted_plugins import name_plugins
from fedsilo.server_app.run.arguments import (
    AnyPath,
    AnyRun,
    Plugins,
    Settings,
    Split,
    Tell,
    Watch,
    folder_of,
    path_of,
    plugin_texts,
    several,
    silent,
    texts_of,
)

if TYPE_CHECKING:
    from fedsilo.server_app.studies.export.command import Export
    from fedsilo.server_app.studies.finetune.results import FinetuneResult
    from fedsilo.server_app.studies.monitor.monitor import Monitored
    from fedsilo.server_app.studies.predict.answers import Predictions
    from fedsilo.server_app.studies.predict.calibration import Calibration
    from fedsilo.server_app.studies.predict.masks import MaskPredictions


def finetune(
    *,
    task: Literal["classification", "segmentation"],
    weights: Sequence[str],
    out: AnyPath,
    dataset: str | None = None,
    site: Sequence[str] = (),
    network: str | None = None,
    epochs: int = 20,
    seeds: int = 3,
    distil_epochs: int = 0,
    settings: Settings | None = None,
    device: str | None = None,
    data_dir: AnyPath | None = None,
    from_site: str | None = None,
    state_dir: AnyPath | None = None,
    images: int = 4,
    plugin: Plugins = None,
    tell: Tell = silent,
) -> FinetuneResult:
    """Fine-tune a finished run's model for a task."""
    from fedsilo.server_app.studies.finetune.command import finetune
    from fedsilo.server_app.studies.finetune.request import FinetuneRequest

    name_plugins(plugin_texts(plugin))
    request = FinetuneRequest(
        task=task,
        weights=tuple(several(weights)),
        out=Path(out),
        dataset=dataset,
        sites=tuple(several(site)),
        network=network,
        epochs=epochs,
        seeds=seeds,
        changes=texts_of(settings),
        device=device,
        data_dir=path_of(data_dir),
        from_site=from_site,
        state_dir=path_of(state_dir),
        images=images,
        distil_epochs=distil_epochs,
    )
    return finetune(request, tell)


def predict(
    run_dir: AnyRun,
    *,
    out: AnyPath | None = None,
    site: str | None = None,
    images: AnyPath | None = None,
    manifest: AnyPath | None = None,
    table: AnyPath | None = None,
    id: str | None = None,
    split: Split | None = None,
    coverage: float | None = None,
    calibration: AnyPath | None = None,
    answer_all: bool = False,
    html: AnyPath | None = None,
    data_dir: AnyPath | None = None,
    state_dir: AnyPath | None = None,
    best: bool = False,
    plugin: Plugins = None,
    watch: Watch = lambda done, total: None,
) -> Predictions | MaskPredictions:
    """Predict new cases with a finished run's model.

    Give exactly one of ``images``, ``manifest``, ``table`` and ``split``. For predicted classes,
    ``frame()`` of the result has the rows of the CSV file: ``predicted``, ``p.<class>``,
    ``entropy`` and so on.
    """
    from fedsilo.server_app.studies.predict.masks import is_finetuned, predict_masks
    from fedsilo.server_app.studies.predict.prediction import predict
    from fedsilo.server_app.studies.predict.request import PredictRequest

    name_plugins(plugin_texts(plugin))
    request = PredictRequest(
        run_dir=folder_of(run_dir),
        site=site,
        images=path_of(images),
        manifest=path_of(manifest),
        table=path_of(table),
        id=id,
        split=split,
        out=path_of(out),
        coverage=coverage,
        calibration=path_of(calibration),
        answer_all=answer_all,
        html=path_of(html),
        data_dir=path_of(data_dir),
        state_dir=path_of(state_dir),
        best=best,
    )
    made = predict_masks if is_finetuned(request.run_dir) else predict
    return made(request, watch)


def calibrate(
    run_dir: AnyRun,
    site: str,
    *,
    coverage: float = 0.9,
    out: AnyPath | None = None,
    data_dir: AnyPath | None = None,
    state_dir: AnyPath | None = None,
    plugin: Plugins = None,
) -> Calibration:
    """Calibrate a finished run's model at a site."""
    from fedsilo.server_app.studies.predict.calibration import calibrate

    name_plugins(plugin_texts(plugin))
    folders = (path_of(out), path_of(data_dir), path_of(state_dir))
    return calibrate(folder_of(run_dir), site, coverage, *folders)


def monitor(
    run_dir: AnyRun,
    *,
    data: AnyPath,
    site: str | None = None,
    coverage: float = 0.9,
    calibration: AnyPath | None = None,
    data_dir: AnyPath | None = None,
    plugin: Plugins = None,
) -> Monitored:
    """Check whether new cases still resemble the training data of a run.

    ``alarms`` of the result lists the checks that are beyond their limit.
    """
    from fedsilo.server_app.studies.monitor.monitor import monitor

    name_plugins(plugin_texts(plugin))
    return monitor(
        folder_of(run_dir),
        Path(data),
        site,
        coverage=coverage,
        calibration=path_of(calibration),
        data_dir=path_of(data_dir),
    )


def export(
    run_dir: AnyRun,
    form: Literal["pt2", "onnx"] = "pt2",
    *,
    site: str | None = None,
    out: AnyPath | None = None,
    data_dir: AnyPath | None = None,
    state_dir: AnyPath | None = None,
    plugin: Plugins = None,
) -> Export:
    """Write a run's model as a program that needs no fedsilo."""
    from fedsilo.server_app.studies.export.command import export

    name_plugins(plugin_texts(plugin))
    folders = (path_of(out), path_of(data_dir), path_of(state_dir))
    return export(folder_of(run_dir), form, site, *folders)


def card(
    run_dir: AnyRun,
    *,
    site: str | None = None,
    out: AnyPath | None = None,
    plugin: Plugins = None,
) -> Path:
    """Write the model card of a run; return its path."""
    from fedsilo.server_app.studies.export.card import card

    name_plugins(plugin_texts(plugin))
    path = path_of(out) or folder_of(run_dir) / "model-card.md"
    card(folder_of(run_dir), site, path)
    return path
