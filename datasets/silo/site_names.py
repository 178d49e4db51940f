"""What a site may be called."""

from __future__ import annotations

import re

LONGEST = 64
_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def site_name_fault(name: str) -> str | None:
    """Return what is wrong with a site's name, which names folders and columns, or None."""
    if _PATTERN.fullmatch(name) and name != "all" and len(name) <= LONGEST:
        return None
    return (
        f"site '{name}' is no plain name of letters, digits, '.', '_' and '-' of at most "
        f"{LONGEST} characters, or is 'all', which stands for the mean over sites"
    )
