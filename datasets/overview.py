"""Every data set in one list: what it is, on what terms, and what of it is on this machine."""

from __future__ import annotations

from fedsilo.datasets.io.locations import find_places
from fedsilo.datasets.registry import DATA_SETS, data_set

Row = dict[str, str]


def overview(data_dir: str) -> list[Row]:
    """Return a row for each data set.

    Args:
        data_dir: where to look; empty: $FEDSILO_DATA.

    Returns:
        Texts by ``name``, ``kind`` (public, own, made-up), ``licence``, ``source``, ``size``,
        ``terms`` and ``here``; empty where there is nothing to say.
    """
    places, rows = find_places(data_dir, ""), []
    for name in DATA_SETS:
        chosen = data_set(name)
        row = {"name": name, "kind": chosen.origin, "here": chosen.found(places)}
        held = chosen.licence
        row["licence"], row["source"] = (held.licence, held.source) if held else ("", "")
        row["size"], row["terms"] = (held.size_text(), held.terms) if held else ("", "")
        rows.append(row)
    return rows
