"""The options of ``fedsilo finetune``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_finetune(commands: Commands) -> None:
    """Add ``finetune``."""
    tune = commands.add_parser("finetune", help="put a finished run's model to a task of its own")
    tune.add_argument("--task", choices=("classification", "segmentation"), required=True)
    tune.add_argument(
        "--weights",
        action="append",
        required=True,
        metavar="WEIGHTS",
        help="what to start from: a run directory, scratch, or a ViT's file or timm:NAME; given "
        "several times, a line of the table each",
    )
    tune.add_argument("--out", type=Path, required=True, help="folder to write; not there yet")
    tune.add_argument("--dataset", help="(default: the first run's)")
    tune.add_argument("--site", action="append", default=[], help="a site (default: all, pooled)")
    tune.add_argument(
        "--network",
        help="segmentation: unet, vit, swin; classification: conv, vgg16-bn, resnet22, vit "
        "(default: the one that takes the run's weights)",
    )
    tune.add_argument("--epochs", type=int, default=20, help="(default %(default)s)")
    tune.add_argument("--seeds", type=int, default=3, help="number of seeds (default %(default)s)")
    tune.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="a setting of data, network or training, instead of the run's or the default",
    )
    tune.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    tune.add_argument("--data-dir", type=Path, help="the data directory (default: the run's)")
    tune.add_argument("--from-site", metavar="SITE", help="a site's own model of the run")
    tune.add_argument("--state-dir", type=Path, help="that site's state (default: the run's)")
    tune.add_argument(
        "--images", type=int, default=4, help="test images drawn (default %(default)s)"
    )
    tune.set_defaults(handler=_finetune)


def _finetune(options: argparse.Namespace) -> None:
    from server_app.finetune.command import finetune

    finetune(options)
