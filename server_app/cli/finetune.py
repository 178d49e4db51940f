"""``fedsilo finetune`` and ``fedsilo pretrain``: options only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedsilo.server_app.cli.options import (
    RUN,
    USE,
    ChangesOption,
    ConfigOption,
    ExperimentArgument,
    FileOption,
    OutOption,
    RunsDataDirOption,
    example,
    set_option,
)
from fedsilo.server_app.cli.printing import line_printer

_Task = Annotated[Literal["classification", "segmentation"], typer.Option("--task")]
_Weights = Annotated[
    list[str],
    typer.Option(
        "--weights",
        metavar="WEIGHTS",
        help="what to start from: a run directory, scratch, or a ViT's file or timm:NAME; "
        "given several times, a line of the table each",
    ),
]
_Folder = Annotated[Path, typer.Option("--out", help="folder to write; not there yet")]
_Dataset = Annotated[str | None, typer.Option("--dataset", help="(default: the first run's)")]
_Sites = Annotated[
    list[str],
    typer.Option(
        "--site",
        default_factory=list,
        show_default=False,
        help="a site (default: all, pooled)",
    ),
]
_Network = Annotated[
    str | None,
    typer.Option(
        "--network",
        help="segmentation: unet, vit, swin, transunet, swinunet; classification: conv, vgg16-bn, "
        "resnet22, vit (default: the one that takes the run's weights)",
    ),
]
_Epochs = Annotated[int, typer.Option("--epochs", show_default=False, help="(default 20)")]
_DistilEpochs = Annotated[
    int,
    typer.Option(
        "--distil-epochs",
        show_default=False,
        help="passes by which unet, swin or swinunet first learns the tokens of a run's ViT",
    ),
]
_Seeds = Annotated[
    int, typer.Option("--seeds", show_default=False, help="number of seeds (default 3)")
]
_Changes = Annotated[
    list[str],
    set_option("a setting of data, network or training, instead of the run's or the default"),
]
_Device = Annotated[
    str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
]
_FromSite = Annotated[
    str | None, typer.Option("--from-site", metavar="SITE", help="a site's own model of the run")
]
_StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="that site's state (default: the run's)")
]
_Images = Annotated[
    int, typer.Option("--images", show_default=False, help="test images drawn (default 4)")
]
_WeightsFile = Annotated[
    Path | None,
    typer.Option(
        "--save-as", "--weights", help="file to write (default: what backbone-weights names)"
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add ``finetune`` and ``pretrain``."""
    app.command(
        "finetune",
        help="put a finished run's model to a task of its own",
        epilog=example(
            "finetune --task classification --weights runs/fedefm --weights scratch --out tuned"
        ),
        rich_help_panel=USE,
    )(_finetune)
    app.command(
        "pretrain",
        help="train an experiment's ViT on public images",
        epilog=example("pretrain fedavg-skin --set data-dir=data"),
        rich_help_panel=RUN,
    )(_pretrain)


def _finetune(
    *,
    task: _Task,
    weights: _Weights,
    out: _Folder,
    dataset: _Dataset = None,
    sites: _Sites,
    network: _Network = None,
    epochs: _Epochs = 20,
    seeds: _Seeds = 3,
    distil_epochs: _DistilEpochs = 0,
    changes: _Changes,
    device: _Device = None,
    data_dir: RunsDataDirOption = None,
    from_site: _FromSite = None,
    state_dir: _StateDir = None,
    images: _Images = 4,
) -> None:
    from fedsilo.server_app.run.progress_bars import make_console
    from fedsilo.server_app.studies.finetune.command import finetune
    from fedsilo.server_app.studies.finetune.request import FinetuneRequest
    from fedsilo.server_app.studies.finetune.results import result_table

    request = FinetuneRequest(
        task=task,
        weights=tuple(weights),
        out=out,
        dataset=dataset,
        sites=tuple(sites),
        network=network,
        epochs=epochs,
        seeds=seeds,
        changes=tuple(changes),
        device=device,
        data_dir=data_dir,
        from_site=from_site,
        state_dir=state_dir,
        images=images,
        distil_epochs=distil_epochs,
    )
    console = make_console()
    say = line_printer(console)
    console.print(result_table(finetune(request, say)))
    say(str(out))


def _pretrain(
    experiment: ExperimentArgument,
    *,
    changes: ChangesOption,
    config: ConfigOption = None,
    out: OutOption = None,
    file: FileOption = None,
    weights: _WeightsFile = None,
) -> None:
    from fedsilo.server_app.run.planning import RunSources
    from fedsilo.server_app.run.progress_bars import make_console
    from fedsilo.server_app.studies.finetune.pretrain import pretrain

    sources = RunSources(file=file, config=config, changes=tuple(changes), out=out)
    say = line_printer(make_console())
    say(f"weights: {pretrain(experiment, sources, weights, say)}")
