"""Numbers as people read them."""

from fedsilo.models.measures.intervals import Estimate

NONE = "n/a"


def share(value: float | None) -> str:
    """Return a figure from 0 to 1, or another of that size, with three decimals."""
    return NONE if value is None else f"{value:.3f}"


def percent(value: float) -> str:
    """Return a share in percent: ``81.2 %``."""
    return f"{100 * value:.1f} %"


def with_interval(found: Estimate | None) -> str:
    """Return a figure with its interval: ``0.812 (0.730 to 0.873)``."""
    if found is None or found.interval is None:
        return share(found.value if found else None)
    return f"{found.value:.3f} ({found.interval.low:.3f} to {found.interval.high:.3f})"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 site``, ``4 sites``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def floored(count: int | None, floor: int) -> str:
    """Return a count of patients, or that it is below the floor."""
    return f"< {floor}" if count is None else f"{count:,}"
