"""What sites and server tell each other of a table's features: sums, and the statistics of all."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy.typing as npt

Vector = npt.NDArray[Any]


@dataclass(frozen=True)
class Sums:
    """Per feature, (features,) float64: values that are there, their sum, and that of squares."""

    __pydantic_config__: ClassVar = {"arbitrary_types_allowed": True}  # SiteFacts are validated

    count: Vector
    total: Vector
    squares: Vector


@dataclass(frozen=True)
class FeatureStatistics:
    """Per feature, (features,) float64: mean and standard deviation; the latter is above 0."""

    mean: Vector
    std: Vector
