"""``fetch``: what runs start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from models.contract.errors import DataError
from server_app.cli.options import DATA, example


def add_commands(app: typer.Typer) -> None:
    """Add ``fetch``."""
    app.command(
        "fetch",
        help="download a data set's files, with checksums",
        epilog=example("fetch heart --data-dir data"),
        rich_help_panel=DATA,
    )(_fetch)


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
