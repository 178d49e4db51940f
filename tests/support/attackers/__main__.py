"""The tables of docs/results/trust-levels.md.

python -m tests.support.attackers ROWS.csv MEMBERSHIP.csv
python -m tests.support.attackers --sums SUMS.csv
"""

import csv
import sys
import tempfile
from pathlib import Path

from fedsilo.engines.inline_engine import flower_identity
from tests.support.attackers.attacks import ATTACKS, HONEST, PLANES, attacked
from tests.support.attackers.membership import distinguished, real, settings_of
from tests.support.attackers.summed import IN_SUMS, attacked_in_sums

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


def rows_read_in_sums(path: str) -> None:
    """Write a line for each attack at 'trust: sums': what the sum of all hospitals gives away."""
    with flower_identity(), open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["attack", "sites", "messages", "answered", "read", "patients", "refused"])
        for name, planned in IN_SUMS.items():
            for messages in (
                [1, planned.messages] if name == "planes, fedavg" else [planned.messages]
            ):
                with tempfile.TemporaryDirectory() as home:
                    made = attacked_in_sums(name, Path(home), messages)
                    row = [name, len(made.sites), made.messages, made.answered]
                    row += [made.recovered(), made.patients(), made.refused.partition(":")[0]]
                table.writerow(row)
                file.flush()
                print(row, flush=True)


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
    if sys.argv[1] == "--sums":
        rows_read_in_sums(sys.argv[2])
    else:
        rows_read(sys.argv[1])
        membership(sys.argv[2])
