"""``fetch`` and ``pretrain``: what runs start from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

import typer

from models.contract.errors import DataError
from server_app.cli.options import (
    ChangesOption,
    ConfigOption,
    ExperimentArgument,
    FileOption,
    OutOption,
)


def add_commands(app: typer.Typer) -> None:
    """Add ``fetch`` and ``pretrain``."""
    app.command("fetch", help="download a data set's files, with checksums")(_fetch)
    app.command("pretrain", help="train an experiment's ViT on public images")(_pretrain)


def _fetch(
    dataset: Annotated[str, typer.Argument(metavar="dataset")],
    *,
    data_dir: Annotated[Path, typer.Option("--data-dir")],
    base_url: Annotated[
        str,
        typer.Option("--base-url", show_default=False, help="another place with the same files"),
    ] = "",
) -> None:
    from datasets.io.download import fetch
    from datasets.registry import data_set

    files = data_set(dataset).files
    if files is None:
        raise DataError(f"data set '{dataset}' has no public files: nothing to fetch")
    for line in fetch(files, data_dir, base_url):
        print(line, flush=True)


def _pretrain(
    experiment: ExperimentArgument,
    *,
    changes: ChangesOption,
    config: ConfigOption = None,
    out: OutOption = None,
    file: FileOption = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="file (default: what backbone-weights names)"),
    ] = None,
) -> None:
    from server_app.finetune.pretrain import pretrain

    pretrain(argparse.Namespace(**locals()))
