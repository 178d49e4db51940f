"""The runs of the papers' tables that wait for a GPU, and the commands that make them.

    python benchmarks/gpu_kit/plans.py NAME [--seeds N] [--device cuda] [--jobs N] [--work DIR]
        [--set KEY=VALUE...]

prints the ``fedsilo`` commands of a plan, one a line, quoted for a shell: first those of one seed,
then those of two, and so on, so that a table is whole at any time. ``compare`` reads finished runs
and continues an interrupted one, so the same lines given again go on where they were. A plan whose
name begins with ``cpu-`` trains on the processor's cores, all seeds at once.
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Table:
    """A table of a paper, made by one ``fedsilo compare``.

    Attributes:
        name: the name of the folder of its runs and of its CSV file.
        experiments: names in simulation.yaml or in the kit's experiments.yaml.
        options: words for the command line after the experiments.
    """

    name: str
    experiments: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Tables that are made one after another from one set of data.

    Attributes:
        data: the sets of prepare.sh that hold what the runs read.
        tables: the tables, in their order.
    """

    data: tuple[str, ...]
    tables: tuple[Table, ...]


# UEFL's tables at the paper's size. FMNIST's schedule ends after 40 rounds (its appendix A)
_FULL = ("--engine", "inline", "--set", "rounds=40", "--set", "server.evaluate-every=10")
# On the processor: the format of images that the other tables of the same pages have
_CORES = ("--engine", "inline", "--set", "machine.memory-format=contiguous")
_FMNIST = ("uefl-table3-fmnist-uefl", "uefl-table3-fmnist-fedavg")
_MNIST = ("uefl-table3-mnist-uefl", "uefl-table3-mnist-fedavg")
_RANKED = ("--metrics", "auc,average-precision")
_NOISY = ("--plugin", "docs/examples/noisy_labels.py", "--set", "dataset=noisy_labels:DIGITS_40")

PLANS: Mapping[str, Plan] = {
    "uefl": Plan(
        ("grey",),
        (
            Table("uefl-fmnist-full", _FMNIST, _FULL),
            Table("uefl-mnist-full", _MNIST, _FULL),
        ),
    ),
    # The other rows of table 3 beside those of "uefl", which are read
    "uefl-more": Plan(
        ("grey",),
        (
            Table(
                "uefl-fmnist-full",
                (*_FMNIST, "uefl-table3-fmnist-disfl", "uefl-table3-fmnist-distrans"),
                _FULL,
            ),
            Table(
                "uefl-mnist-full",
                (*_MNIST, "uefl-table3-mnist-disfl", "uefl-table3-mnist-distrans"),
                _FULL,
            ),
        ),
    ),
    "uefl-tables": Plan(
        ("grey",),
        (
            Table("uefl-mnist-full-table5", ("uefl-table5-uefl", "uefl-table5-fedavg"), _FULL),
            Table("uefl-mnist-full-table2", ("uefl-table2-kmeans", "uefl-table2-gaussian"), _FULL),
        ),
    ),
    "signs": Plan(
        ("signs",),
        (
            Table(
                "uefl-lite0-full",
                ("uefl-lite0", "fedavg-lite0", "uefl-best-lite0", "distrans-lite0", "disfl-lite0"),
                (*_FULL, "--plugin", "docs/examples/lite0.py"),
            ),
        ),
    ),
    "mammograms": Plan(
        ("mammograms",),
        (
            Table(
                "mias-512",
                ("mix-mias-512", "fed-mias-512", "fed-align-mias-512", "fed-align-cl-mias-512"),
                (
                    "--engine",
                    "inline",
                    "--splits",
                    "--median",
                    "--metrics",
                    "auc,average-precision",
                ),
            ),
        ),
    ),
    # One process for each of the five silos
    "fedefm": Plan(
        ("fashion",),
        (
            Table(
                "fedefm-wide",
                ("fedavg-unseen-wide", "fedefm-theta-unseen-wide", "fedefm-unseen-wide"),
                ("--engine", "processes", "--metrics", "accuracy,own-*accuracy"),
            ),
        ),
    ),
    # What two or five seeds left open (docs/claims.md)
    "cpu-uefl": Plan(
        ("grey", "fashion"),
        (
            Table(
                "uefl-tables-min-count",
                (
                    "uefl-fmnist-small",
                    "uefl-fmnist-small-static",
                    "uefl-fmnist-small-segments-4",
                    "uefl-fmnist-small-gamma-0.3",
                    "uefl-fmnist-small-codes-16",
                    "uefl-fmnist-small-codes-256",
                ),
                (*_CORES, "--tests", "accuracy,entropy"),
            ),
        ),
    ),
    "cpu-fedaligncl": Plan(
        ("grey", "fashion", "mammograms", "signs"),
        (
            Table(
                "fedaligncl-digits",
                ("fed-digits", "fed-cl-digits", "fed-align-digits", "fed-align-cl-digits"),
                (*_CORES, *_NOISY, "--tests", "accuracy"),
            ),
        ),
    ),
}


def runs_on_cores(name: str) -> bool:
    """Return whether a plan trains on the processor's cores and leaves the GPU alone."""
    return name.startswith("cpu-")


def commands(name: str, given: argparse.Namespace) -> list[list[str]]:
    """Return the words of a plan's commands, ``compare`` first, in the order in which they run.

    Raises:
        KeyError: there is no such plan.
    """
    turns: Sequence[int] = range(1, given.seeds + 1)
    if runs_on_cores(name):
        turns = (given.seeds,)
    return [command(table, seeds, given) for seeds in turns for table in PLANS[name].tables]


def command(table: Table, seeds: int, given: argparse.Namespace) -> list[str]:
    """Return the words of one table's command for so many seeds."""
    runs = Path(given.work) / "runs"
    words = ["compare", *table.experiments, *table.options, "--seeds", str(seeds)]
    # The data are public, and mini-MIAS has sites with few test images, which would not be shown
    words += ["--unequal", "--no-floor"]
    words += ["--jobs", str(given.jobs), "--file", f"{given.work}/simulation.yaml"]
    words += ["--out", str(runs / table.name), "--csv", str(runs / f"{table.name}.csv")]
    for change in (f"data.dir={given.work}/data", f"machine.device={given.device}", *given.set):
        words += ["--set", change]
    return words


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; None means that of this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", choices=list(PLANS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--work", default="/tmp/fedsilo-gpu", help="folder of data and runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args(words)


def main() -> None:
    """Print the commands of the plan."""
    given = arguments()
    for words in commands(given.plan, given):
        print(shlex.join(words))


if __name__ == "__main__":
    main()
