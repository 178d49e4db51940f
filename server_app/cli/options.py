"""Options that several commands share, each with one name and one help text.

A command's function names them as types: ``changes: ChangesOption, out: OutOption = None``. Nothing
here imports what a command needs to run, so that ``--help`` stays quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedsilo.models.contract.errors import SettingError

# What a person wants: commands of one are listed together, in the order in which these stand here
RUN, COMPARE, LOOK, USE, DEPLOY, DATA = (
    "Run",
    "Compare",
    "Look at finished runs",
    "Use a model",
    "Deploy",
    "Data and settings",
)
PANELS = (RUN, COMPARE, LOOK, USE, DEPLOY, DATA)

Engine = Literal["ray", "inline"]
Split = Literal["train", "val", "test"]
MeasuredSplit = Literal["test", "val"]

ExperimentArgument = Annotated[str, typer.Argument(metavar="experiment", show_default=False)]
ExperimentsArgument = Annotated[
    list[str], typer.Argument(metavar="experiment...", show_default=False)
]
RunDirArgument = Annotated[Path, typer.Argument(metavar="run_dir", show_default=False)]
RunDirsArgument = Annotated[list[Path], typer.Argument(metavar="run_dir...", show_default=False)]


def example(words: str) -> str:
    """Return the last line of a command's help: what one could type."""
    return f"Example: fedsilo {words}"


def set_option(meaning: str) -> Any:
    """Return the option ``--set``, which may be given several times."""
    return typer.Option(
        "--set", metavar="KEY=VALUE", default_factory=list, show_default=False, help=meaning
    )


# Where a run's settings come from: what `RunSources` of server_app/run/planning.py holds
ChangesOption = Annotated[list[str], set_option("a setting, instead of the experiment's")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE.toml", help="settings from a file")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="folder of run directories (default: the settings', else runs)"),
]
FileOption = Annotated[Path | None, typer.Option("--file", help="simulation.yaml to read")]

# One run
EngineOption = Annotated[
    Engine,
    typer.Option(
        "--engine",
        show_default=False,
        help="ray: by 'flwr run'; inline: in this process (default ray)",
    ),
]
RayAddressOption = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="auto|HOST:PORT",
        help="a Ray cluster that runs (default: Ray starts one for this run)",
    ),
]
SupernodesOption = Annotated[
    int | None, typer.Option("--supernodes", help="simulated sites (default: all silos)")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="seed, instead of the experiment's")]
TrackOption = Annotated[
    Literal["none", "tensorboard", "mlflow"] | None,
    typer.Option("--track", help="where the rows of metrics.csv and traffic.csv also go"),
]
NameOption = Annotated[str | None, typer.Option("--name", help="name of the run directory")]

# Many runs
JobsOption = Annotated[
    str,
    typer.Option(
        "--jobs", metavar="N|slurm", show_default=False, help="runs at once (default: one a core)"
    ),
]
SlurmOption = Annotated[
    list[str],
    typer.Option(
        "--slurm",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
        help="with --jobs slurm: slurm_partition, timeout_min, cpus_per_task, mem_gb ...",
    ),
]
CsvOption = Annotated[Path | None, typer.Option("--csv", help="also write the tables as CSV")]
MarkdownOption = Annotated[
    Path | None, typer.Option("--markdown", help="also write the tables as Markdown")
]

# Finished runs
RunsDataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="the data directory (default: the run's)")
]
RunsStateDirOption = Annotated[
    Path | None, typer.Option("--state-dir", help="the site's state (default: the run's)")
]
SitesOption = Annotated[
    list[str],
    typer.Option("--site", default_factory=list, show_default=False, help="a site (default: all)"),
]


def refuse_below(minimum: int, option: str, value: int) -> None:
    """Refuse an option's number that is too small.

    Raises:
        SettingError: it is.
    """
    if value < minimum:
        raise SettingError(f"--{option} is {value}; it must be at least {minimum}")
