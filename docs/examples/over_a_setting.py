"""Draw accuracy over a setting: python over_a_setting.py concentration runs/a runs/b ..."""

import sys

import pandas as pd

from fedsilo import load_run

setting, *folders = sys.argv[1:]
rows = []
for folder in folders:
    run = load_run(folder)
    rows.append({setting: run.settings[setting], "accuracy": run.summary["mean"]["accuracy"]})
points = pd.DataFrame(rows).groupby(setting)["accuracy"].agg(["mean", "std", "count"])
print(points)
axes = points["mean"].plot(yerr=points["std"].fillna(0), marker="o", ylabel="accuracy")
axes.figure.savefig("over-a-setting.png")
