"""What the pictures of finished runs have in common: their titles."""

from __future__ import annotations

import textwrap
from pathlib import Path

from fedsilo.models.contract.settings_schema import without_groups
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.run_directory import RunDirectory


def run_title(run_dir: Path, settings: RunSettings) -> str:
    """Return a run's name, and below it the method with what it does otherwise than by default."""
    usual = without_groups(type(settings.own)())
    switches = [
        f"{key} {value}"
        for key, value in without_groups(settings.own).items()
        if value != usual[key]
    ]
    method = RunDirectory(run_dir).read_json("summary.json")["title"]
    lines = textwrap.wrap(", ".join([method, *switches]), 40, break_on_hyphens=False)
    return "\n".join([run_dir.resolve().name, *lines])
