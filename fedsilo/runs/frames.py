"""A finished run's CSV files and sites as pandas tables.

pandas takes a second to import, so only these functions import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedsilo.runs.shown import Document, Row

if TYPE_CHECKING:
    import pandas as pd

_METRIC_TYPES = {"round": int, "site": str, "split": str, "metric": str, "value": float}
_TRAFFIC_TYPES = {
    "round": int,
    "phase": str,
    "site": str,
    "bytes_down": int,
    "bytes_up": int,
    "seconds": float,
    "steps": int,
    "samples": int,
}


def metrics_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Build the table of ``metrics.csv`` from its rows of text; columns as in the file."""
    return _typed_frame(rows, _METRIC_TYPES)


def traffic_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Build the table of ``traffic.csv`` from its rows of text; columns as in the file."""
    return _typed_frame(rows, _TRAFFIC_TYPES)


def sites_frame(silos: Document) -> pd.DataFrame:
    """Build a table with a row per site from the content of ``silos.json``."""
    import pandas as pd

    rows = []
    for site, facts in silos.items():
        row = {"site": site, "distribution": facts["distribution"], **facts["sizes"]}
        rows.append(row | {"dropped": facts["dropped"]})
    return pd.DataFrame(rows)


def _typed_frame(rows: Sequence[Row], types: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list(types))
    # Texts keep the type that pandas gives them: 'str' would turn a missing cell into "nan"
    numbers = {column: kind for column, kind in types.items() if kind is not str}
    return frame.astype(numbers)
