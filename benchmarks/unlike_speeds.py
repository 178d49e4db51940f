"""Accuracy over virtual hours with one of six hospitals ten times slower: three ways to wait.

    python benchmarks/unlike_speeds.py --csv FILE [--picture FILE] [--seconds 600]

FedAvg on the digits, cut into six silos by a Dirichlet draw (concentration 0.5). A site takes a
step a second, silo-6 one in ten seconds, so that a round of ten steps takes it 100 s and the others
10 s. ``synchronous`` waits for all, ``quorum`` for five of six and drops what is late, ``buffered``
for five of six and discounts what is late. All have the same virtual time, so not the same number
of rounds or of samples. The model of every hundredth second is measured on the test samples of all
six silos: ``accuracy`` is their mean, ``slow`` that of silo-6.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
import torch

from fedsilo.datasets.io.state_files import load_state
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records import checkpoints
from fedsilo.server_app.run.inline_engine import run_inline
from fedsilo.server_app.studies.predict.model import open_model

SITES, SLOW, STEPS, FACTOR = 6, "silo-6", 10, 10
COMMON: Mapping[str, Value] = {
    "method": "fedavg",
    "dataset": "digits",
    "partition": "dirichlet",
    "concentration": 0.5,
    "silos": SITES,
    "width": 6,
    "batch-size": 16,
    "local-steps": STEPS,
    "learning-rate": 0.003,
    "dropout": 0.0,
    "mc-passes": 0,
    "evaluate-every": 0,
    "device": "cpu",
    "speeds": f"{{{SLOW}: {1 / FACTOR}}}",
}
WAYS: Mapping[str, Mapping[str, Value]] = {
    "synchronous": {},
    "quorum": {"round-quorum": 0.83, "late-replies": "drop"},
    "buffered": {"round-quorum": 0.83, "late-replies": "discounted"},
}
SEEDS = (0, 1, 2)


def main() -> None:
    """Run all ways and seeds, write the CSV, and draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--seconds", type=int, default=600, help="virtual time of each run")
    options = parser.parse_args()
    rows: list[tuple[str, int, int, float, int, float, float]] = []
    checkpoints.KEPT = 10**6  # the model of each round is measured afterwards
    for seed in SEEDS:
        for way in WAYS:
            with tempfile.TemporaryDirectory() as out:
                for row in measured(way, seed, options.seconds, Path(out)):
                    rows.append((way, seed, *row))
                    print(*rows[-1], flush=True)
    columns = ["way", "seed", "seconds", "hours", "rounds", "accuracy", "slow"]
    table = pd.DataFrame(rows, columns=columns)
    table.to_csv(options.csv, index=False, float_format="%.4f", lineterminator="\n")
    if options.picture:
        draw(table, options.picture)


def measured(
    way: str, seed: int, seconds: int, out: Path
) -> Iterator[tuple[int, float, int, float, float]]:
    """Yield for each round of the slow site: seconds, hours, rounds by then, two accuracies."""
    each = STEPS * (FACTOR if way == "synchronous" else 1)
    named = {"seed": seed, "rounds": seconds // each, "out": str(out), "run-name": "run"}
    run = run_inline(resolve({**COMMON, **WAYS[way], **named}), SITES)
    ends = pd.DataFrame(run.read_csv("arrivals.csv")).astype({"round": int, "seconds": float})
    by_round = ends.groupby("round")["seconds"].max()
    models = {site: open_model(run.path, site) for site in run.read_json("silos.json")}
    for now in range(STEPS * FACTOR, seconds + 1, STEPS * FACTOR):
        round_ = int((by_round <= now).sum())
        arrays, _ = load_state(run.path / "checkpoints" / f"round-{round_:06d}.safetensors")
        found = {}
        for site, model in models.items():
            names = model.network.state_dict().keys() & arrays.keys()
            values = {name: torch.from_numpy(arrays[name]) for name in names}
            model.network.load_state_dict(values, strict=False)
            with torch.no_grad():
                tokens = model.network.encode(model.inputs())
                answers = model.network.classify(model.network.features(tokens)).argmax(1)
            right = answers == model.samples("test").labels
            found[site] = right.double().mean().item()
        yield now, now / 3600, round_, sum(found.values()) / len(found), found[SLOW]


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw both accuracies over virtual hours, the mean over seeds and its deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"accuracy": "mean of six hospitals", "slow": f"{SLOW}, ten times slower"}
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, (column, title) in zip(axes, titles.items(), strict=True):
        for way in WAYS:
            of = table[table["way"] == way].groupby("hours")[column]
            mean, sd = of.mean(), of.std()
            axis.plot(mean.index, mean, label=way, marker=".")
            axis.fill_between(mean.index, mean - sd, mean + sd, alpha=0.15)
        axis.set(title=title, xlabel="virtual hours")
    axes[0].set_ylabel("test accuracy")
    axes[0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
