"""Draw accuracy over epsilon from the table of ``fedsilo compare``.

    python benchmarks/privacy_curve.py docs/results/privacy-heart.csv docs/results/privacy-heart.png

Experiments are named ``<method>-heart-epsilon<E>``; ``<method>-heart-exact`` has no noise. FLamby's
numbers (arXiv:2210.04620) are of the same data and split.
"""

import re
import sys

import matplotlib as mpl
import pandas as pd

FLAMBY = {1.0: 0.685, 5.0: 0.704, 10.0: 0.700}
TITLES = {"fedavg": "FedAvg", "picsr": "PICSR"}


def main(table: str, picture: str) -> None:
    """Draw mean and standard deviation over the seeds, of the mean over hospitals."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = pd.read_csv(table)
    found = found[(found["group"] == "all") & (found["metric"] == "accuracy")]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for colour, method in zip(("C0", "C1"), TITLES, strict=True):
        rows = found[found["experiment"].str.startswith(f"{method}-")]
        points = sorted(
            (float(match[1]), row["mean"], row["sd"])
            for _, row in rows.iterrows()
            if (match := re.search(r"epsilon(\d+)$", row["experiment"]))
        )
        budgets, means, deviations = zip(*points, strict=True)
        label = TITLES[method]
        axes.errorbar(budgets, means, deviations, marker="o", capsize=3, color=colour, label=label)
        exact = float(rows[rows["experiment"].str.endswith("-exact")]["mean"].iloc[0])
        axes.axhline(exact, linestyle=":", color=colour)
    values = list(FLAMBY.values())
    axes.plot(list(FLAMBY), values, marker="s", color="grey", label="FLamby's FedAvg")
    axes.legend(loc="lower right")
    axes.set(xlabel="epsilon per patient, delta = 1e-4", ylabel="mean accuracy of four hospitals")
    axes.set(ylim=(0.6, 0.9), xlim=(0, 12), title="dotted: without noise; bars: sd over five seeds")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:3])
