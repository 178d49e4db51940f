"""Tables 1 to 8 of the UEFL paper as they are printed, and what each varies.

Left out is what is no figure: an entropy printed as "-", and table 6's accuracies of CIFAR100 in
one segment, printed as 2.86, .953 and .119.

The paper contradicts itself three times; of such rows the earlier in ``ROWS`` stands. FedAvg on
GTSRB has .670/.677/.634 in table 3 and, as "FL", .897/.851/.803 in table 4. 64 codewords on GTSRB
have .950/.964/.911 in tables 3, 4 and 7 and .965/.974/.926 in table 8; 16 of them, in one segment,
have .188/.183/.206 in table 6 and .515/.506/.486 in table 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsilo.models.contract.settings_schema import Value

FEDAVG, DISTRANS, DISFL, UEFL = "FedAvg", "DisTrans", "DisFL", "UEFL"
SHIFTS = ("D1", "D2", "D3")
FIVE_SILOS = ("s1a", "s1b", "s1c", "s2a", "s3a")

# What section 4 says of the tables that do not vary it
CODES = {"mnist": 32, "fmnist": 64, "gtsrb": 64, "cifar10": 64, "cifar100": 64}
GAMMA = {"mnist": 0.3, "fmnist": 0.1, "gtsrb": 0.1, "cifar10": 0.2, "cifar100": 0.1}

_CERTAIN = ("accuracy", "entropy")
_WHOLE = ("codebook-loss", "perplexity", "entropy", "accuracy")

Line = tuple[float | None, ...]


@dataclass(frozen=True)
class Row:
    """What a table has of one method in one setting.

    Attributes:
        table: its number.
        method: in the paper's words, DisFL for a codebook that never grows.
        dataset: the run's word for it.
        lines: the numbers of each part, in the order of ``parts``; None: none is printed.
        own: what the table varies, as keys of the run config.
        metrics: what the numbers of a line are.
        parts: distributions, silos, or all of them.
        silos: how many there are.
    """

    table: int
    method: str
    dataset: str
    lines: tuple[Line, ...]
    own: Mapping[str, Value] = field(default_factory=dict)
    metrics: tuple[str, ...] = _CERTAIN
    parts: tuple[str, ...] = SHIFTS
    silos: int = 9

    def printed(self) -> dict[str, dict[str, float]]:
        """Return part -> metric -> number."""
        return {
            part: {
                metric: number
                for metric, number in zip(self.metrics, line, strict=True)
                if number is not None
            }
            for part, line in zip(self.parts, self.lines, strict=True)
        }


def _main(method: str, dataset: str, *lines: Line) -> Row:
    """Return a row of table 3; DisTrans has no entropy."""
    metrics = _CERTAIN[: len(lines[0])]
    return Row(3, method, dataset, lines, metrics=metrics, parts=(*SHIFTS, "all"))


def _whole(table: int, dataset: str, own: Mapping[str, Value], *lines: Line) -> Row:
    return Row(table, UEFL, dataset, lines, own, _WHOLE)


def _unbalanced(method: str, *lines: Line) -> Row:
    return Row(5, method, "mnist", lines, parts=FIVE_SILOS, silos=5)


def _segments(dataset: str, codes: int, segments: int, *lines: Line) -> Row:
    return Row(6, UEFL, dataset, lines, {"uefl.codes": codes, "uefl.segments": segments})


_GAUSSIAN: Mapping[str, Value] = {"uefl.codeword-start": "gaussian", "uefl.refresh": "none"}

ROWS = (
    _main(FEDAVG, "mnist", (0.874, 0.212), (0.848, 0.231), (0.618, 0.377), (0.780, 0.273)),
    _main(FEDAVG, "fmnist", (0.801, 0.246), (0.825, 0.232), (0.784, 0.341), (0.803, 0.273)),
    _main(FEDAVG, "gtsrb", (0.670, 0.623), (0.677, 0.634), (0.634, 0.652), (0.660, 0.636)),
    _main(FEDAVG, "cifar10", (0.676, 0.172), (0.622, 0.178), (0.553, 0.183), (0.617, 0.177)),
    _main(FEDAVG, "cifar100", (0.110, 1.74), (0.072, 1.86), (0.083, 2.13), (0.088, 1.91)),
    _main(DISTRANS, "mnist", (0.856,), (0.799,), (0.789,), (0.815,)),
    _main(DISTRANS, "fmnist", (0.721,), (0.705,), (0.694,), (0.707,)),
    _main(DISTRANS, "gtsrb", (0.898,), (0.900,), (0.897,), (0.898,)),
    _main(DISTRANS, "cifar10", (0.721,), (0.719,), (0.659,), (0.699,)),
    _main(DISTRANS, "cifar100", (0.289,), (0.261,), (0.251,), (0.267,)),
    _main(UEFL, "mnist", (0.951, 0.120), (0.885, 0.196), (0.924, 0.131), (0.920, 0.149)),
    _main(UEFL, "fmnist", (0.857, 0.147), (0.848, 0.188), (0.845, 0.167), (0.850, 0.167)),
    _main(UEFL, "gtsrb", (0.95, 0.0196), (0.964, 0.0206), (0.911, 0.0314), (0.942, 0.0239)),
    _main(UEFL, "cifar10", (0.776, 0.0192), (0.713, 0.0245), (0.671, 0.0229), (0.720, 0.0222)),
    _main(UEFL, "cifar100", (0.362, 0.728), (0.335, 0.624), (0.282, 0.612), (0.326, 0.655)),
    Row(
        1,
        DISFL,
        "cifar100",
        ((3.10, 17.54, 1.66, 0.142), (2.91, 17.41, 1.76, 0.135), (2.63, 16.82, 1.76, 0.112)),
        {"uefl.codes": 512},
        _WHOLE,
    ),
    _whole(
        1,
        "cifar100",
        {"uefl.codes": 128, "uefl.max-iterations": 3},
        (1.28, 19.31, 0.7822, 0.375),
        (0.976, 27.42, 0.6665, 0.341),
        (0.978, 22.00, 0.7112, 0.304),
    ),
    _whole(
        2,
        "mnist",
        {"uefl.codes": 128, **_GAUSSIAN},
        (0.6202, 6.26, 0.125, 0.888),
        (0.6063, 5.99, 0.296, 0.554),
        (0.6096, 5.35, 0.267, 0.622),
    ),
    _whole(
        2,
        "mnist",
        {"uefl.codes": 128},
        (0.0862, 59.64, 0.0935, 0.945),
        (0.0785, 57.58, 0.1604, 0.906),
        (0.0779, 99.38, 0.1509, 0.929),
    ),
    Row(4, FEDAVG, "gtsrb", ((0.897,), (0.851,), (0.803,)), metrics=("accuracy",)),
    Row(4, DISFL, "gtsrb", ((0.712,), (0.673,), (0.602,)), metrics=("accuracy",)),
    Row(4, UEFL, "gtsrb", ((0.95,), (0.964,), (0.911,)), metrics=("accuracy",)),
    _unbalanced(
        FEDAVG, (0.964, 0.0312), (0.936, 0.0252), (0.964, 0.0499), (0.796, 0.1477), (0.508, 0.2560)
    ),
    _unbalanced(
        UEFL, (0.952, 0.0291), (0.974, 0.0170), (0.944, 0.0308), (0.836, 0.1261), (0.828, 0.1048)
    ),
    _segments("gtsrb", 16, 1, (0.188, 2.81), (0.183, 2.61), (0.206, 2.63)),
    _segments("gtsrb", 16, 2, (0.918, None), (0.903, None), (0.863, None)),
    _segments("gtsrb", 16, 4, (0.923, None), (0.911, None), (0.862, None)),
    _segments("cifar100", 32, 1, (None, 2.75), (None, 2.72), (None, 2.53)),
    _segments("cifar100", 32, 2, (0.362, 1.97), (0.335, 2.04), (0.274, 2.18)),
    _segments("cifar100", 32, 4, (0.401, 0.821), (0.351, 0.853), (0.305, 0.881)),
    _whole(
        7,
        "gtsrb",
        {"uefl.gamma": 0.5},
        (3.57, 14.84, 0.814, 0.575),
        (3.55, 15.37, 0.780, 0.657),
        (3.25, 15.01, 0.821, 0.605),
    ),
    _whole(
        7,
        "gtsrb",
        {"uefl.gamma": 0.4},
        (3.47, 15.49, 0.681, 0.647),
        (3.60, 15.56, 0.672, 0.674),
        (3.41, 14.99, 0.732, 0.582),
    ),
    _whole(
        7,
        "gtsrb",
        {"uefl.gamma": 0.3},
        (3.52, 17.01, 0.622, 0.652),
        (3.67, 16.87, 0.614, 0.693),
        (3.44, 16.47, 0.645, 0.639),
    ),
    _whole(
        7,
        "gtsrb",
        {"uefl.gamma": 0.2},
        (1.53, 24.24, 0.0843, 0.936),
        (1.62, 23.99, 0.0896, 0.941),
        (1.64, 25.84, 0.167, 0.881),
    ),
    _whole(
        7,
        "gtsrb",
        {"uefl.gamma": 0.1},
        (0.387, 25.85, 0.0196, 0.95),
        (0.346, 25.94, 0.0206, 0.964),
        (0.458, 26.96, 0.0314, 0.911),
    ),
    _whole(
        8,
        "gtsrb",
        {"uefl.codes": 8},
        (3.61, 4.78, 2.02, 0.257),
        (3.68, 4.86, 2.01, 0.265),
        (3.38, 4.81, 2.03, 0.249),
    ),
    _whole(
        8,
        "gtsrb",
        {"uefl.codes": 16},
        (3.41, 10.46, 1.36, 0.515),
        (3.55, 10.54, 1.37, 0.506),
        (3.23, 10.61, 1.39, 0.486),
    ),
    _whole(
        8,
        "gtsrb",
        {"uefl.codes": 32},
        (0.127, 25.91, 0.0412, 0.956),
        (0.0885, 25.42, 0.0313, 0.966),
        (0.178, 26.37, 0.117, 0.911),
    ),
    _whole(
        8,
        "gtsrb",
        {"uefl.codes": 64},
        (0.0975, 26.79, 0.0086, 0.965),
        (0.0853, 26.32, 0.0084, 0.974),
        (0.1907, 27.23, 0.0166, 0.926),
    ),
    _whole(
        8,
        "gtsrb",
        {"uefl.codes": 128},
        (0.0512, 38.73, None, 0.954),
        (0.0453, 34.16, None, 0.968),
        (0.0726, 43.42, None, 0.917),
    ),
    _whole(
        8,
        "gtsrb",
        {"uefl.codes": 256},
        (0.0543, 41.20, 0.0043, 0.962),
        (0.0301, 38.96, 0.0054, 0.959),
        (0.0577, 50.57, 0.0103, 0.904),
    ),
)
