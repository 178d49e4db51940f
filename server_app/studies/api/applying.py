"""Applies the model of a finished run: fine-tune, predict, calibrate, monitor, export, card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from fedsilo.server_app.config.trusted_plugins import name_plugins
from fedsilo.server_app.run.arguments import (
    AnyPath,
    Settings,
    Tell,
    Watch,
    folder_of,
    path_of,
    plugin_texts,
    several,
    silent,
    texts_of,
)
from fedsilo.server_app.run.options import (
    DataDir,
    Option,
    OwnPlugin,
    RunDir,
    Sites,
    Split,
    StateDir,
    command,
)

if TYPE_CHECKING:
    from fedsilo.server_app.studies.export.command import Export
    from fedsilo.server_app.studies.finetune.results import FinetuneResult
    from fedsilo.server_app.studies.monitor.monitor import Monitored
    from fedsilo.server_app.studies.predict.answers import Predictions
    from fedsilo.server_app.studies.predict.calibration import Calibration
    from fedsilo.server_app.studies.predict.masks import MaskPredictions


@command
def finetune(
    *,
    task: Annotated[Literal["classification", "segmentation"], "the task to learn"],
    weights: Annotated[
        Sequence[str],
        "a starting point: a run directory, scratch, a ViT's file, or timm:NAME; may be "
        "repeated for a table with a row for each",
    ],
    out: Annotated[AnyPath, "folder to write; must not exist"],
    dataset: Annotated[str | None, "the data set (default: the first run's)"] = None,
    site: Sites = (),
    network: Annotated[
        str | None,
        "segmentation: unet, vit, swin, transunet, swinunet; classification: conv, vgg16-bn, "
        "resnet22, vit (default: the one that takes the run's weights)",
    ] = None,
    epochs: Annotated[int, "passes over the training data"] = 20,
    seeds: Annotated[int, "number of seeds"] = 3,
    distil_epochs: Annotated[
        int, "epochs in which unet, swin or swinunet first learns the tokens of a run's ViT"
    ] = 0,
    settings: Annotated[
        Settings | None,
        Option(
            "a setting of data, network or training that replaces the run's",
            name="--set",
            value="KEY=VALUE",
        ),
    ] = None,
    device: Annotated[str | None, "auto, cpu, cuda or cuda:N (default: auto)"] = None,
    data_dir: DataDir = None,
    from_site: Annotated[
        str | None, Option("start from a site's own model of the run", value="SITE")
    ] = None,
    state_dir: StateDir = None,
    images: Annotated[int, "test images to draw"] = 4,
    plugin: OwnPlugin = None,
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


@command
def predict(
    run_dir: RunDir,
    *,
    out: Annotated[
        AnyPath | None,
        Option("CSV file to write, with a JSON file next to it; must not exist", required=True),
    ] = None,
    site: Annotated[
        str | None, "the site whose model is used (default: the model of all sites)"
    ] = None,
    images: Annotated[AnyPath | None, "predict the image files in this folder"] = None,
    manifest: Annotated[
        AnyPath | None, "predict the files in the column 'path' of this table"
    ] = None,
    table: Annotated[
        AnyPath | None,
        "predict the rows of a CSV, Excel or Parquet file; columns by name, in any order",
    ] = None,
    id: Annotated[str | None, "the table's column with the patients' ids"] = None,
    split: Annotated[Split | None, "predict this split of the site"] = None,
    coverage: Annotated[
        float | None, "also give prediction sets of this coverage; needs 'calibrate'"
    ] = None,
    calibration: Annotated[
        AnyPath | None, "the file that 'calibrate' wrote (default: the run's)"
    ] = None,
    answer_all: Annotated[bool, "also answer cases that are unlike the training samples"] = False,
    html: Annotated[
        AnyPath | None, "also write a page of the cases, the most doubtful first; must not exist"
    ] = None,
    data_dir: DataDir = None,
    state_dir: StateDir = None,
    best: Annotated[
        bool, "use the model of the best round ('early-stopping-metric'), not of the last"
    ] = False,
    plugin: OwnPlugin = None,
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


@command
def calibrate(
    run_dir: RunDir,
    site: Annotated[str, Option("the site whose validation rows are used", name="--site")],
    *,
    coverage: Annotated[float, "coverage of the prediction sets"] = 0.9,
    out: Annotated[AnyPath | None, "JSON file to write (default: in the run directory)"] = None,
    data_dir: DataDir = None,
    state_dir: StateDir = None,
    plugin: OwnPlugin = None,
) -> Calibration:
    """Calibrate a finished run's model at a site."""
    from fedsilo.server_app.studies.predict.calibration import calibrate

    name_plugins(plugin_texts(plugin))
    folders = (path_of(out), path_of(data_dir), path_of(state_dir))
    return calibrate(folder_of(run_dir), site, coverage, *folders)


@command
def monitor(
    run_dir: RunDir,
    *,
    data: Annotated[
        AnyPath,
        "new cases: a table, a manifest of images, or a folder of images; with labels or without",
    ],
    site: Annotated[
        str | None,
        "the site with the model and the training data to compare with (default: the first)",
    ] = None,
    coverage: Annotated[float, "promised coverage of the prediction sets; needs 'calibrate'"] = 0.9,
    calibration: Annotated[
        AnyPath | None, "the file that 'calibrate' wrote (default: the run's)"
    ] = None,
    data_dir: DataDir = None,
    plugin: OwnPlugin = None,
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


@command
def export(
    run_dir: RunDir,
    form: Annotated[
        Literal["pt2", "onnx"], Option("pt2 (torch.export) or onnx", name="--format")
    ] = "pt2",
    *,
    site: Annotated[
        str | None, "the site whose model is used (default: the model of all sites)"
    ] = None,
    out: Annotated[AnyPath | None, "folder to write (default: in the run directory)"] = None,
    data_dir: DataDir = None,
    state_dir: StateDir = None,
    plugin: OwnPlugin = None,
) -> Export:
    """Write a run's model as a program that needs no fedsilo."""
    from fedsilo.server_app.studies.export.command import export

    name_plugins(plugin_texts(plugin))
    folders = (path_of(out), path_of(data_dir), path_of(state_dir))
    return export(folder_of(run_dir), form, site, *folders)


@command
def card(
    run_dir: RunDir,
    *,
    site: Annotated[str | None, "the site, for its own model"] = None,
    out: Annotated[
        AnyPath | None, "file to write (default: model-card.md in the run directory)"
    ] = None,
    plugin: OwnPlugin = None,
) -> Path:
    """Write the model card of a run; return its path."""
    from fedsilo.server_app.studies.export.card import card

    name_plugins(plugin_texts(plugin))
    path = path_of(out) or folder_of(run_dir) / "model-card.md"
    card(folder_of(run_dir), site, path)
    return path
