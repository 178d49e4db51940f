"""The UEFL paper's numbers, each only beside the setting that it was measured in.

That is: data, silos and partition; of UEFL codes, gamma, segments, codebooks and the codewords'
start (section 4); and, as the authors' code has them, the network at its full width and the
training of a round. Neither says how many rounds; a run has no fewer than the shortest iterations
that the paper names. Where a run differs in any of these no number is shown, and in which it
differs is said.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import Value, defaults
from fedsilo.strategies.loop.reporting import Published
from fedsilo.strategies.published.conditions import Conditions, in_words, settings_of
from fedsilo.strategies.published.uefl_tables import CODES, DISFL, GAMMA, ROWS, SHIFTS, UEFL, Row

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
    "initial-weights": [""],
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
_ROUNDS = {"rounds": 20.0}
_ITERATION_ROUNDS = {"uefl.iteration-rounds": 20.0, "uefl.extension-rounds": 5.0}


def shifted_digits(method: str, common: CommonSettings, own: Any = None) -> Published:
    """Return the paper's numbers for a run: of silos, of distributions and of all.

    Args:
        method: FedAvg, DisTrans or UEFL, as the paper writes it.
        common: the run's settings.
        own: the method's, if it has any.
    """
    values = settings_of(common, own)
    if method == UEFL and values["uefl.max-iterations"] == 1:
        method = DISFL
    of_data = [row for row in ROWS if (row.method, row.dataset) == (method, common.dataset)]
    differing = [_conditions(row).departures(values) for row in of_data]
    rows = [row for row, differs in zip(of_data, differing, strict=True) if not differs]
    if rows:
        return Published(_with_means(_together(rows), rows[0]))
    return Published(unlike=in_words(min(differing, key=len, default=[])))


def _conditions(row: Row) -> Conditions:
    """Return the setting that a row was measured in."""
    colour = row.dataset not in ("mnist", "fmnist")
    exact = {
        **_TRAINING,
        **(_COLOUR if colour else _GREY),
        **_of_method(row),
        "dataset": [row.dataset],
        "silos": [row.silos],
        "silo-train-size": [0, 4000 if row.dataset == "cifar100" else 2000],
    }
    least = _ROUNDS | (_ITERATION_ROUNDS if row.method == UEFL else {})
    return Conditions(exact, least, given=["initial-weights"] if colour else ())


def _of_method(row: Row) -> dict[str, Collection[Value]]:
    """Return what UEFL's own settings may be."""
    usual = {"uefl.codes": CODES[row.dataset], "uefl.gamma": GAMMA[row.dataset]}
    exact = {**_USUAL, **usual, **row.own}
    needless = _OF_EXTENSION if row.method == DISFL else ()
    return {key: [value] for key, value in exact.items() if key not in needless}


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
