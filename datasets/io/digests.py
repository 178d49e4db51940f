"""Digests of JSON, by which contents are told apart."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def json_digest(facts: Any) -> str:
    """Return a SHA-256 of JSON-serialisable ``facts``, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
