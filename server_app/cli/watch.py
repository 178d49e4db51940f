"""``watch``: a run while it goes on."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.cli.options import RUN, example

_Run = Annotated[Path | None, typer.Argument(metavar="run_dir", show_default=False)]
_Deployment = Annotated[
    Path | None,
    typer.Option("--deployment", metavar="DIR", help="a deployment's newest run, instead of a run"),
]
_Once = Annotated[bool, typer.Option("--once", help="print one line and end")]
_Port = Annotated[
    int | None, typer.Option("--port", help="serve a page on this port of 127.0.0.1; 0: a free one")
]


def add_commands(app: typer.Typer) -> None:
    """Add ``watch``."""
    app.command(
        "watch",
        help="see how far a run is, while it goes on",
        epilog=example("watch runs/uefl-digits"),
        rich_help_panel=RUN,
    )(_watch)


def _watch(
    run_dir: _Run = None,
    *,
    deployment: _Deployment = None,
    once: _Once = False,
    port: _Port = None,
) -> None:
    from fedsilo.server_app.studies.watch.view import Look, look_at_deployment, look_at_run

    look: Look
    if run_dir is not None and deployment is None:
        look = partial(look_at_run, run_dir)
    elif deployment is not None and run_dir is None:
        look = partial(look_at_deployment, deployment)
    else:
        raise SettingError("name a run directory, or a deployment by --deployment: one of both")
    if once and port is not None:
        raise SettingError("--once prints a line and ends, --port goes on: give one of them")
    view = look()  # what is wrong is said now, not by a page
    if once:
        print(view.line())
    elif port is not None:
        from fedsilo.server_app.studies.watch.serve import WatchServer

        with WatchServer(port, look) as server:
            print(
                f"{view.line()}\n{server.address} (interrupt to end; the run goes on)", flush=True
            )
            with suppress(KeyboardInterrupt):  # it ends the page, not the run
                server.serve_forever()
    else:
        from fedsilo.server_app.run.progress_bars import make_console
        from fedsilo.server_app.studies.watch.terminal import follow

        with suppress(KeyboardInterrupt):
            follow(look, make_console())
