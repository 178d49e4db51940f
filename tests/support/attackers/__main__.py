"""The tables of docs/results/trust-levels.md.

python -m tests.support.attackers ROWS.csv MEMBERSHIP.csv
"""

import csv
import sys
import tempfile
from pathlib import Path

from fedsilo.server_app.run.inline_engine import flower_identity
from tests.support.attackers.attacks import ATTACKS, HONEST, PLANES, attacked
from tests.support.attackers.membership import distinguished, real, settings_of

BUDGETS = (0.0, 1.0, 8.0, 64.0)
# What many methods do alike, or what takes long, at the budget that promises least alone
FEW = {*PLANES} - {"planes, fedavg"} | {*HONEST, "images by class means, fedproto"}


def rows_read(path: str) -> None:
    """Write a line for each attack, level and budget."""
    with flower_identity(), open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["attack", "trust", "epsilon", "messages", "answered", "read", "patients"])
        for name in ATTACKS:
            for budget in (0.0, 64.0) if name in FEW else BUDGETS:
                with tempfile.TemporaryDirectory() as home:
                    site = attacked(name, budget, Path(home))
                    trust = "nobody" if budget else "server"
                    row = [name, trust, budget or "", site.messages, site.answered]
                    row += [site.hospital.recovered(site.candidates), len(site.hospital.rows())]
                table.writerow(row)
                file.flush()
                print(row, site.hospital.refusals[:1], flush=True)


def membership(path: str) -> None:
    """Write a line for each kind of data and budget: what the best threshold shows."""
    people = {"heart, Cleveland": real("heart"), "digits": real("digits")}
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["data", "samples", "epsilon", "epsilon shown at 95 %"])
        for name, whole in people.items():
            network = "logistic" if whole.inputs.ndim == 2 else "conv"
            for budget in (0.5, 2.0, 0.0):
                shown = distinguished(settings_of(budget, network), whole)
                table.writerow([name, len(whole.labels), budget or "", f"{shown:.2f}"])
                file.flush()


if __name__ == "__main__":
    rows_read(sys.argv[1])
    membership(sys.argv[2])
