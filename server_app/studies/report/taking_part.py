"""Who took part in a run, and whom it went on without: of interest to every reader."""

from __future__ import annotations

from typing import Any

from fedsilo.server_app.studies.report.numbers import counted
from fedsilo.server_app.studies.report.runs import ReportedRun

_SPLITS = ("train", "val", "test")
_MANY_CLASSES = 8  # a table of more columns cannot be read


def taking_part(run: ReportedRun) -> dict[str, Any]:
    """Return what ``sites.html`` says of a run."""
    silos, failed = run.run.silos, run.summary["failures"]
    names = run.class_names(next(iter(silos)))
    return {
        "name": run.name,
        "site_count": counted(len(silos), "site"),
        "simulated": run.simulated,
        "sizes": [
            [
                site,
                *(f"{facts['sizes'].get(split, 0):,}" for split in _SPLITS),
                f"{facts['dropped']:,}",
            ]
            for site, facts in silos.items()
        ],
        "class_names": names,
        "by_class": [
            [site, *(f"{count:,}" for count in facts["label_counts"]["test"])]
            for site, facts in silos.items()
            if len(names) <= _MANY_CLASSES
        ],
        "stopped": run.summary["stopped"],
        "failed": [[str(f["round"]), f["phase"], f["site"], f["reason"]] for f in failed],
    }
