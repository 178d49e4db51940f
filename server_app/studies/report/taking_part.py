"""Who took part in a run, and whom it went on without: of interest to every reader."""

from __future__ import annotations

from fedsilo.server_app.studies.report.numbers import counted
from fedsilo.server_app.studies.report.page import Block, Table, Text
from fedsilo.server_app.studies.report.runs import ReportedRun

_SPLITS = ("train", "val", "test")
_MANY_CLASSES = 8  # above it a column a class is no table that one reads


def who_took_part(run: ReportedRun) -> list[Block]:
    """Return the sites with their sizes, and with what their test samples are of."""
    silos = run.run.silos
    sizes = Table(
        "Sites and their samples",
        ["site", "training", "validation", "test", "left out"],
        [
            [
                site,
                *(f"{facts['sizes'].get(split, 0):,}" for split in _SPLITS),
                f"{facts['dropped']:,}",
            ]
            for site, facts in silos.items()
        ],
        "Left out: samples that lack a value or could not be decoded.",
    )
    kind = (
        "The sites were simulated in one place: no hospital's computer took part."
        if run.simulated
        else "Each site is a hospital's own computer."
    )
    return [Text([f"{counted(len(silos), 'site')}. {kind}"]), sizes, *_by_class(run)]


def _by_class(run: ReportedRun) -> list[Block]:
    silos = run.run.silos
    names = run.class_names(next(iter(silos)))
    if len(names) > _MANY_CLASSES:
        return []
    rows = [
        [site, *(f"{count:,}" for count in facts["label_counts"]["test"])]
        for site, facts in silos.items()
    ]
    return [Table("Test samples by class", ["site", *names], rows)]


def failures(run: ReportedRun) -> list[Block]:
    """Return what the run went on without, and why it ended early, if it did."""
    blocks: list[Block] = []
    if stopped := run.summary["stopped"]:
        blocks.append(Text([f"The run ended before its last round: {stopped}."]))
    failed = run.summary["failures"]
    if not failed:
        return [*blocks, Text(["Every site answered every message."])]
    rows = [[str(f["round"]), f["phase"], f["site"], f["reason"]] for f in failed]
    return [
        *blocks,
        Table(
            "What the run went on without",
            ["round", "phase", "site", "reason"],
            rows,
            "A site that failed in a round is no part of that round's model.",
        ),
    ]
