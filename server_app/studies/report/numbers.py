"""Numbers as people read them."""

from fedsilo.models.maths.intervals import Interval

NONE = "n/a"
_STEP = 1000.0


def share(value: float | None) -> str:
    """Return a figure from 0 to 1, or another of that size, with three decimals."""
    return NONE if value is None else f"{value:.3f}"


def with_interval(value: float | None, interval: Interval | None) -> str:
    """Return a figure with its interval: ``0.812 (0.730 to 0.873)``."""
    if value is None or interval is None:
        return share(value)
    return f"{value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 site``, ``4 sites``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def bytes_text(number: float) -> str:
    """Return bytes in the unit that leaves at most three digits before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < _STEP:
            return f"{number:.0f} B" if unit == "B" else f"{number:.3g} {unit}"
        number /= _STEP
    return f"{number:,.3g} TB"


def seconds_text(seconds: float) -> str:
    """Return a duration: ``12.3 s``, ``4 min 05 s``, ``3 h 07 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
