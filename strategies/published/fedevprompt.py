"""Tables 1 and 2 of the FedEvPrompt paper: balanced accuracy on Fed-ISIC2019.

The paper's clients are named here by what their scores and sizes fit: C1 Barcelona, C2 to C4 the
three larger parts of HAM10000 in FLamby's order, C5 ViDIR's diapositives (its scores are of 88 and
22 test images), C6 MSK4.
"""

from __future__ import annotations

from typing import Any

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.loop.reporting import Published
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.published.conditions import WHOLE, Conditions

_SITES = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias", "msk4")
_TABLES: dict[str, tuple[float, ...]] = {
    "Local b,t": (72.56, 50.00, 89.91, 79.94, 67.61, 50.00),
    "Local g": (50.00, 50.48, 84.79, 78.91, 71.59, 50.00),
    "FedAvg b,t": (74.74, 72.79, 67.74, 79.89, 67.61, 77.09),
    "FedAvgPers": (77.79, 68.01, 84.84, 78.08, 67.61, 82.66),
    "FedProx": (81.34, 68.14, 74.69, 75.15, 77.84, 78.65),
    "FedProto": (71.88, 69.04, 66.34, 69.71, 58.52, 73.57),
    "FedDistill": (81.08, 67.42, 60.96, 77.13, 70.45, 80.33),
    "FedEvPrompt": (81.02, 71.83, 84.15, 79.02, 68.18, 79.35),
    "FedAvg b only": (50.00, 70.04, 70.29, 79.61, 71.59, 79.21),
    "FedAvg b,t + KD": (73.02, 71.41, 76.80, 81.74, 67.61, 79.25),
    "FedAvg g": (50.00, 70.88, 72.77, 50.00, 67.61, 50.00),
    "FedAvg g + KD": (81.1, 71.32, 72.83, 78.89, 63.64, 80.49),
    "KD random": (78.12, 69.40, 76.80, 80.30, 68.75, 77.65),
}
# Section 3: ViT-S/16 from ImageNet, 5 rounds of 15 epochs, AdamW's decay and rates, lambda
_CONDITIONS = Conditions(
    {
        "dataset": ["isic2019"],
        **WHOLE,
        "target": ["nevus"],
        "network": ["vit"],
        "train-backbone": [False],
        "backbone": ["vit_small_patch16_224"],
        "rounds": [5],
        "local-epochs": [15],
        "local-steps": [0],
        "optimiser": ["adamw"],
        "learning-rate": [5e-4],
        "basic-learning-rate": [2.5e-4],
        "weight-decay": [1e-2],
        "fedevprompt.distillation-weight": [0.0, 1e-6],
        "fedevprompt.buffer-maps": [5],
    },
    given=["backbone-weights"],
    sites=_SITES,
)


def with_prompts(method: str, common: CommonSettings) -> str:
    """Return the row of a method that has one for either kind of prompts."""
    prompts = {"b-t": "b,t", "g": "g", "none": "none"}
    return f"{method} {prompts[common.prompt_sets]}"


def dermoscopy(
    row: str, common: CommonSettings, participants: Participants, own: Any = None
) -> Published:
    """Return a row of the tables, if the run is on the same sites, task, network and schedule.

    The mean over clients is that of the row's six numbers (of "FedAvg b only" 70.12; the paper
    prints 70.18).

    Args:
        row: in the paper's words.
        common: the run's settings.
        participants: the run's sites.
        own: the method's settings, where the paper says something of them.
    """
    if row not in _TABLES:
        return Published()
    accuracies = [value / 100 for value in _TABLES[row]]
    table = {
        site: {"balanced-accuracy": value}
        for site, value in sorted(zip(_SITES, accuracies, strict=True))
    }
    mean = {"balanced-accuracy": sum(accuracies) / len(accuracies)}
    return _CONDITIONS.beside(Published({**table, "all": mean}), common, own, participants.sites())
