"""The UEFL paper's numbers, each only beside the setting that it was measured in.

That is: data, silos and partition; of UEFL codes, gamma, segments, codebooks and the codewords'
start (section 4); and, as the authors' code has them, the network at its full width and the
training of a round. Neither says how many rounds; a run has no fewer than the shortest iterations
that the paper names. Where a run differs in any of these no number is shown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from models.contract.settings import CommonSettings, NoSettings
from models.contract.settings_schema import Value, as_mapping, defaults
from strategies.loop.reporting import Published
from strategies.published.uefl_tables import CODES, DISFL, GAMMA, ROWS, SHIFTS, UEFL, Row

Figures = dict[str, dict[str, float]]

_AS_BY_DEFAULT = (
    *("partition", "silo-set", "dropout", "mc-passes", "optimiser", "weight-decay", "rate-decay"),
    *("local-steps", "epoch-steps", "clip-norm", "noise-multiplier"),
)
# Keys, and what each may be
_TRAINING: Mapping[str, Collection[Value]] = {
    **{key: [value] for key, value in defaults(CommonSettings).items() if key in _AS_BY_DEFAULT},
    "loss": ["auto", "cross-entropy"],
    "pixel-scale": ["raw"],
    "local-epochs": [20],
    "batch-size": [1024],
    "learning-rate": [1e-4],
    "silo-test-size": [0, 500],
    "uefl.codebook-weight": [1.0],
    "uefl.commitment-weight": [0.25],
}
_GREY: Mapping[str, Collection[Value]] = {
    "network": ["auto", "conv"],
    "width": [128],
    "leading-norm": [False],
}
_COLOUR: Mapping[str, Collection[Value]] = {"network": ["auto", "vgg16-bn"], "width": [128]}
# Of UEFL, where a table varies something else
_USUAL: Mapping[str, Value] = {
    "uefl.segments": 1,
    "uefl.codebooks": "shared",
    "uefl.codeword-start": "kmeans",
    "uefl.refresh": "kmeans",
}
_OF_EXTENSION = ("uefl.gamma", "uefl.codeword-start", "uefl.refresh")  # nothing to DisFL
# The fewest rounds: of a run, of UEFL's first iteration and of each later one
_ROUNDS = {"rounds": 20}
_ITERATION_ROUNDS = {"uefl.iteration-rounds": 20, "uefl.extension-rounds": 5}


def shifted_digits(method: str, common: CommonSettings, own: Any = None) -> Published:
    """Return the paper's numbers for a run: of silos, of distributions and of all.

    Args:
        method: FedAvg, DisTrans or UEFL, as the paper writes it.
        common: the run's settings.
        own: the method's, if it has any.
    """
    values = as_mapping(common) | as_mapping(own or NoSettings())
    if method == UEFL and values["uefl.max-iterations"] == 1:
        method = DISFL
    rows = [row for row in ROWS if row.method == method and _was_measured(row, values)]
    return _with_means(_together(rows), rows[0]) if rows else {}


def _was_measured(row: Row, values: Mapping[str, Value]) -> bool:
    """Tell whether a row is of a run's settings."""
    colour = row.dataset not in ("mnist", "fmnist")
    wanted = {
        **_TRAINING,
        **(_COLOUR if colour else _GREY),
        **_of_method(row),
        "dataset": [row.dataset],
        "silos": [row.silos],
        "silo-train-size": [0, 4000 if row.dataset == "cifar100" else 2000],
    }
    alike = all(values[key] in allowed for key, allowed in wanted.items() if key in values)
    pretrained = values["initial-weights"] != ""
    return alike and pretrained == colour and _lasted(row, values)


def _of_method(row: Row) -> dict[str, Collection[Value]]:
    """Return what UEFL's own settings may be."""
    usual = {"uefl.codes": CODES[row.dataset], "uefl.gamma": GAMMA[row.dataset]}
    exact = {**_USUAL, **usual, **row.own}
    needless = _OF_EXTENSION if row.method == DISFL else ()
    return {key: [value] for key, value in exact.items() if key not in needless}


def _lasted(row: Row, values: Mapping[str, Value]) -> bool:
    least = _ROUNDS | (_ITERATION_ROUNDS if row.method == UEFL else {})
    return all(float(values[key]) >= rounds for key, rounds in least.items())


def _together(rows: Sequence[Row]) -> Figures:
    """Return the first row's numbers and, of later rows of the same run, what it has not."""
    first = rows[0].printed()
    accuracies = {part: first[part].get("accuracy") for part in rows[0].parts}
    joined = {part: dict(figures) for part, figures in first.items()}
    for row in rows[1:]:
        printed = row.printed()
        if all(printed[part].get("accuracy") == accuracies[part] for part in row.parts):
            joined = {part: printed.get(part, {}) | figures for part, figures in joined.items()}
    return joined


def _with_means(printed: Figures, row: Row) -> Figures:
    """Return the numbers with the means that are not printed, of a distribution's silos and all."""
    parts = {part: figures for part, figures in printed.items() if part != "all"}
    means = {} if row.silos == 9 else {shift: _of_shift(parts, shift) for shift in SHIFTS}
    means["all"] = _mean(list(parts.values()))
    return parts | {part: figures | printed.get(part, {}) for part, figures in means.items()}


def _of_shift(silos: Figures, shift: str) -> dict[str, float]:
    """Return the mean over a distribution's silos: s1a and s1b are of D1."""
    return _mean([figures for silo, figures in silos.items() if silo[1] == shift[1]])


def _mean(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric that all have."""
    return {
        metric: round(sum(figures[metric] for figures in several) / len(several), 4)
        for metric in several[0]
        if all(metric in figures for figures in several)
    }
