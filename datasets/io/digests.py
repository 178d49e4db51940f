"""Digests: what tells contents apart, and what publishers give to check a file by."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def json_digest(facts: Any) -> str:
    """Return a SHA-256 of JSON-serialisable ``facts``, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def md5_of(content: bytes) -> str:
    """Return the checksum that publishers of data sets give, in hexadecimal digits."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def md5_of_file(path: Path) -> str:
    """Return the same of a file, which need not fit into memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
