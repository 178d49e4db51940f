"""Draw accuracy over a setting: python over_a_setting.py concentration runs/a runs/b ..."""

import json
import sys
import tomllib
from pathlib import Path

import pandas as pd

setting, *folders = sys.argv[1:]
rows = []
for folder in folders:
    value = tomllib.loads(Path(folder, "config.toml").read_text())
    for key in setting.split("."):  # uefl.gamma is 'gamma' of the table 'uefl'
        value = value[key]
    accuracy = json.loads(Path(folder, "summary.json").read_text())["mean"]["accuracy"]
    rows.append({setting: value, "accuracy": accuracy})
points = pd.DataFrame(rows).groupby(setting)["accuracy"].agg(["mean", "std", "count"])
print(points)
axes = points["mean"].plot(yerr=points["std"].fillna(0), marker="o", ylabel="accuracy")
axes.figure.savefig("over-a-setting.png")
