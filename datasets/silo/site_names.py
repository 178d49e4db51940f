"""What a site may be called."""

from __future__ import annotations

import re


def site_name_fault(name: str) -> str:
    """Say what is wrong with a site's name, which names folders and columns; empty: nothing."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) and name != "all":
        return ""
    return (
        f"site '{name}' is no plain name of letters, digits, '.', '_' and '-', or is "
        "'all', which stands for the mean over sites"
    )
