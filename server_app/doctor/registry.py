"""All checks by target: ``fedsilo doctor site | server | run``, and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsilo.server_app.doctor import run, server, site
from fedsilo.server_app.doctor.findings import Check

TARGETS: Mapping[str, Sequence[Check[Any]]] = {
    "site": site.CHECKS,
    "server": server.CHECKS,
    "run": run.CHECKS,
}
