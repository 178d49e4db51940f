"""``fetch``, ``datasets``, ``manifest``: what runs start from, its terms, what of it is here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.one_line import one_line
from fedsilo.server_app.cli.options import DATA, example


def add_commands(app: typer.Typer) -> None:
    """Add ``fetch``, ``datasets`` and ``manifest``."""
    app.command(
        "fetch",
        help="download a data set's files, with checksums",
        epilog=example("fetch heart --data-dir data"),
        rich_help_panel=DATA,
    )(_fetch)
    app.command(
        "datasets",
        help="list the data sets, their licences, and what of them is here",
        epilog=example("datasets --data-dir data"),
        rich_help_panel=DATA,
    )(_datasets)
    app.command(
        "manifest",
        help="write the manifest of a public image data set's folder: inbreast, cbis-ddsm, ranzcr",
        epilog=example("manifest cbis-ddsm data/cbis-ddsm"),
        rich_help_panel=DATA,
    )(_manifest)


def _fetch(
    dataset: Annotated[str, typer.Argument(metavar="dataset")],
    *,
    data_dir: Annotated[Path, typer.Option("--data-dir")],
    base_url: Annotated[
        str,
        typer.Option("--base-url", show_default=False, help="another place with the same files"),
    ] = "",
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="you agree to the data set's terms")
    ] = False,
) -> None:
    from fedsilo.datasets.io.download import fetch
    from fedsilo.datasets.io.public_files import refuse_unaccepted
    from fedsilo.datasets.registry import data_set, licences

    files, licence = data_set(dataset).files, licences(dataset)
    for line in licence.lines() if licence else ():
        print(line, flush=True)
    if files is None or licence is None:
        by_hand = f"; get them from {licence.source}" if licence and licence.terms else ""
        raise DataError(f"data set '{dataset}' has no public files: nothing to fetch{by_hand}")
    refuse_unaccepted(dataset, licence, accept_licence)
    for line in fetch(files, data_dir, base_url):
        print(line, flush=True)


def _datasets(
    *,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="where to look (default: $FEDSILO_DATA)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    from rich.table import Table

    from fedsilo.datasets.registry import overview
    from fedsilo.server_app.run.progress_bars import make_console

    rows = overview(str(data_dir or ""))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("data set", "kind", "licence", "terms", "size", "here")
    for row in rows:
        table.add_row(*(row[key] for key in ("name", "kind", "licence", "terms", "size", "here")))
    make_console().print(table)


def _manifest(
    recipe: Annotated[str, typer.Argument(metavar="recipe")],
    folder: Annotated[Path, typer.Argument(help="the data set as its source gives it out")],
) -> None:
    from fedsilo.datasets.images.recipes import MANIFEST, RECIPES, write_manifest

    counted = write_manifest(recipe, folder)
    made = RECIPES[recipe]
    print(f"{folder / MANIFEST}: {counted.total()} images")
    for label, count in sorted(counted.items()):
        print(f"  {one_line(label, 60)}: {count}")
    print(f"licence: {made.licence} ({made.source})")
    classes = made.classes or {label: [label] for label in sorted(counted)}
    print(f"for {made.dataset}.yaml, in the data directory:")
    print(f"sites: {{{recipe}: {folder.name}/{MANIFEST}}}")
    print(f"classes: {json.dumps(classes)}")
