"""Accuracy against bytes: FedAvg with updates in fewer bytes, on three data sets.

    FEDSILO_DATA=DIR python benchmarks/wire_bytes.py [--csv FILE] [--data NAME ...]
    python benchmarks/wire_bytes.py --csv FILE --picture FILE    # draw the rows of a file

Each way runs with the same seeds, budget and settings, none of which was chosen by it. Accuracy is
of the last model on the sites' test data, bytes are those of all replies and messages of a run.
"""

import argparse
import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch

from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve

Row = dict[str, Value]

SEEDS = (1, 2, 3)
_COMMON: Row = {
    "method": "fedavg",
    "machine.device": "cpu",
    "train.mc-passes": 0,
    "server.evaluate-every": 0,
}
_IMAGES: Row = {
    "split.silos": 3,
    "split.silo-test-size": 120,
    "network.width": 8,
    "train.local-epochs": 1,
}
DATA: dict[str, tuple[int, Row]] = {
    "heart": (4, {"dataset": "heart", "network.name": "mlp", "network.width": 64, "rounds": 20}),
    "digits": (3, {**_IMAGES, "dataset": "digits", "split.silo-train-size": 240, "rounds": 20}),
    "fmnist": (
        3,
        {
            **_IMAGES,
            "dataset": "fmnist",
            "split.silo-train-size": 300,
            "split.silo-test-size": 300,
            "rounds": 15,
        },
    ),
}
WAYS: dict[str, Row] = {
    "fp32": {},
    "bf16": {"server.wire-precision": "bf16"},
    "bf16 both ways": {"server.wire-precision": "bf16", "server.wire-down": "bf16"},
}


def measured(data: str, way: str, seed: int) -> Row:
    """Return the row of one run."""
    sites, own = DATA[data]
    values = {**_COMMON, **own, **WAYS[way], "seed": seed, "run.name": "run"}
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        directory = run_inline(resolve({**values, "run.out": out}), sites)
        summary = directory.read_json("summary.json")
    row: Row = {"data": data, "way": way, "seed": seed}
    row["accuracy"] = round(summary["mean"]["accuracy"], 4)
    return row | {f"bytes-{way}": count for way, count in sorted(summary["bytes"].items())}


def rows_of(data: list[str]) -> Iterator[Row]:
    """Yield all runs' rows."""
    for name in data:
        for way in WAYS:
            for seed in SEEDS:
                yield measured(name, way, seed)


def draw(table: Path, picture: Path) -> None:
    """Draw accuracy over megabytes that sites sent, the mean over seeds and its deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = pd.read_csv(table)
    names = [name for name in DATA if name in set(rows["data"])]
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(4 * len(names), 3.8), layout="constrained", squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=True):
        for way in WAYS:
            of = rows[(rows["data"] == name) & (rows["way"] == way)]
            accuracy = of["accuracy"]
            spread = accuracy.std()
            axis.errorbar(of["bytes-up"].mean() / 1e6, accuracy.mean(), spread, fmt="o", label=way)
        axis.set(title=name, xlabel="megabytes sent by the sites")
        axis.set_xlim(left=0)
    axes[0][0].set_ylabel("test accuracy")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Run, print, and write the rows as CSV, or draw the rows of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=list(DATA))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.picture:
        draw(options.csv, options.picture)
        return
    torch.set_num_threads(1)
    rows: list[Row] = []
    for row in rows_of(options.data):
        rows.append(row)
        print(*row.values(), flush=True)
        if options.csv:
            write_atomically(options.csv, pd.DataFrame(rows).to_csv(index=False))


if __name__ == "__main__":
    main()
