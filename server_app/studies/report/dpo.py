"""A report for a data protection officer: what left each hospital, how much, and what bounds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fedsilo.client_app.site.audit_log import ANSWERED, grouped
from fedsilo.client_app.site.policy import SiteFile
from fedsilo.datasets.io.state_files import load_state
from fedsilo.models.contract.messages import ARRAYS, METRICS
from fedsilo.models.contract.settings_schema import Value, key_of
from fedsilo.server_app.records.summary import NO_PRIVACY
from fedsilo.server_app.studies.report.hospital_files import AuditLog
from fedsilo.server_app.studies.report.numbers import bytes_text
from fedsilo.server_app.studies.report.page import Block, Facts, Items, Section, Table, Text
from fedsilo.server_app.studies.report.runs import ReportedRun
from fedsilo.server_app.studies.report.taking_part import failures, who_took_part

_LISTS = ("methods", "datasets", "records", "refused_records")
_NO_LIMITS = ("site", "audit_log")


@dataclass(frozen=True)
class HospitalFiles:
    """What a hospital lays beside a run for its own report; None: nothing."""

    audit_log: AuditLog | None = None
    site_file: SiteFile | None = None


def dpo_sections(run: ReportedRun, files: HospitalFiles) -> list[Section]:
    """Return the sections about one run."""
    sections = [
        Section("Who took part", who_took_part(run)),
        Section("What left each site, in words", [*_in_words(run)]),
        Section("What left each site, by bytes", [*_by_bytes(run)]),
        Section("What left each site, by record", [*_by_record(run)]),
        Section("Differential privacy", [*_privacy(run)]),
        Section("Refusals and failures", failures(run)),
        Section("What the hospitals allowed", [*_allowed(run, files.site_file)]),
    ]
    if files.audit_log:
        sections.append(Section("The hospital's own log", [*_log(run, files.audit_log)]))
    return sections


def _in_words(run: ReportedRun) -> Iterator[Block]:
    yield Text(["Records of patients stay at the site. This leaves it, and tells of them:"])
    yield Items(run.summary["privacy"]["leaves each site"])


def _by_bytes(run: ReportedRun) -> Iterator[Block]:
    up, down = Counter[tuple[str, str]](), Counter[str]()
    messages = Counter[str]()
    for row in run.run.traffic:
        up[row["site"], row["phase"]] += int(row["bytes_up"])
        down[row["site"]] += int(row["bytes_down"])
        messages[row["site"]] += 1
    phases = list(dict.fromkeys(row["phase"] for row in run.run.traffic))
    rows = [
        [
            site,
            str(messages[site]),
            *(bytes_text(up[site, phase]) if (site, phase) in up else "-" for phase in phases),
            bytes_text(sum(up[site, phase] for phase in phases)),
            bytes_text(down[site]),
        ]
        for site in sorted(messages)
    ]
    columns = ["site", "messages", *(f"left in '{phase}'" for phase in phases)]
    yield Table(
        "Bytes by site and kind of message",
        [*columns, "left in all", "came in all"],
        rows,
        "hello: who are you, at the start; train: a round's training; evaluate: the final "
        "measurement; others are a method's own.",
    )


def _by_record(run: ReportedRun) -> Iterator[Block]:
    measured = Counter[tuple[str, str]]()
    for row in run.run.metrics:
        measured[row["site"], row["metric"].partition(".")[0]] += 1
    sites = sorted({site for site, _ in measured})
    names = sorted({name for _, name in measured})
    yield Table(
        "Measurements: how many numbers left",
        [METRICS, *sites],
        [[name, *(str(measured[site, name]) for site in sites)] for name in names],
        "Over all rounds and splits; 'class', 'confidence' and 'uncertainty' are counts, at the "
        "end. Each reply also has the number of training samples, seconds and peak memory.",
    )
    path = run.run.path / "model.safetensors"
    if not path.is_file():
        yield Text(["The server holds no array at the end: models stayed at the sites."])
        return
    arrays, _ = load_state(path)
    values, groups = Counter[str](), grouped(f"{ARRAYS}/{name}" for name in arrays)
    for name, array in arrays.items():
        values[next(iter(grouped([f"{ARRAYS}/{name}"])))] += int(np.size(array))
    yield Table(
        "Arrays that the server holds at the end",
        ["record", "arrays", "numbers", "as 32 bits"],
        [
            [name, str(count), f"{values[name]:,}", bytes_text(4 * values[name])]
            for name, count in sorted(groups.items())
        ],
        "Made of what the sites sent. What a reply held, record by record, stands in each "
        "hospital's own audit log, which a hospital can lay beside this report.",
    )


def _privacy(run: ReportedRun) -> Iterator[Block]:
    privacy = run.summary["privacy"]
    guarantee = privacy["guarantee"]
    if guarantee == NO_PRIVACY:
        yield Text(
            [
                "This run gives no differential-privacy guarantee. Nothing bounds what all of the "
                "above tells of one patient."
            ],
            warning=True,
        )
    else:
        yield from _epsilon(guarantee)
    if noise := privacy.get("perturbation"):
        yield Text([f"Noise of the method's own, which guarantees nothing: {noise}."])


def _epsilon(guarantee: dict[str, Any]) -> Iterator[Block]:
    yield Facts(
        [
            ("epsilon", f"{guarantee['epsilon']:.4g}, of the site that spent most"),
            ("epsilon of a change", f"{guarantee['epsilon-of-a-change']:.4g}"),
            *(
                (name, f"{guarantee[name]:g}")
                for name in ("delta", "clip-norm", "noise-multiplier")
            ),
            ("accountant", guarantee["accountant"]),
        ]
    )
    rows = [
        [site, str(s["releases"]), f"{s['epsilon']:.4g}", f"{s['epsilon-of-a-change']:.4g}"]
        for site, s in guarantee["sites"].items()
    ]
    columns = ["site", "noisy messages", "epsilon", "epsilon of a change"]
    yield Table("Spent in this run, by site", columns, rows)
    yield Text([f"What the numbers cover: {guarantee['of']}."])
    if noise := guarantee.get("noise"):
        yield Text([f"Noise of weights that are summed in secret: {noise}."])


def _allowed(run: ReportedRun, site_file: SiteFile | None) -> Iterator[Block]:
    if site_file is None:
        yield Text(
            [
                "The sites of this run were simulated, and no site file held."
                if run.simulated
                else "What a hospital allows stands in its own site file, which no run directory "
                "has. At the hospital, 'fedsilo report --for dpo --site-file FILE' shows its keys."
            ]
        )
        return
    lists = [
        (name.replace("_", "-"), ", ".join(getattr(site_file, name)) or "nothing")
        for name in _LISTS
    ]
    yield Text([f"The site file of {site_file.site or 'the site'}: what may be asked and leave."])
    yield Facts(lists)
    limits = [f for f in fields(SiteFile) if "rule" in f.metadata and f.name not in _NO_LIMITS]
    rows = [
        [
            key_of(limit.name),
            _text(getattr(site_file, limit.name)),
            "site file" if key_of(limit.name) in site_file.given else "default",
            limit.metadata["rule"].help,
        ]
        for limit in limits
    ]
    yield Table(
        "Limits in force",
        ["key", "value", "said by", "what it bounds"],
        rows,
        "The node config may be stricter: of both the stricter holds. The file is as it was when "
        "this report was written; a run before may have met another.",
    )


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "(empty)"


def _log(run: ReportedRun, log: AuditLog) -> Iterator[Block]:
    lines = log.of_run(str(run.run.settings.common.run_name))
    outcomes = Counter(str(line["outcome"]) for line in lines)
    yield Text(
        [
            f"{len(lines)} messages of this run, from {lines[0]['time']} to {lines[-1]['time']}: "
            + ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            + f". Bytes that left: {bytes_text(sum(line['bytes-out'] for line in lines))}; that "
            f"came: {bytes_text(sum(line['bytes-in'] for line in lines))}."
        ]
    )
    if log.torn:
        yield Text([f"{log.torn} lines of the log are cut short; their messages never left."])
    records = Counter[tuple[str, str, str]]()
    messages = Counter[tuple[str, str, str]]()
    for line in lines:
        for record, count in line["records"].items():
            records[line["site"], line["kind"], record] += count
            messages[line["site"], line["kind"], record] += 1
    yield Table(
        "What left, by record",
        ["site", "kind of message", "record", "messages", "entries in all"],
        [[*key, str(messages[key]), str(records[key])] for key in sorted(records)],
    )
    if others := [line for line in lines if line["outcome"] != ANSWERED]:
        yield Table(
            "What the hospital did not answer",
            ["time", "site", "round", "outcome", "reason"],
            [
                [line["time"], line["site"], str(line["round"]), line["outcome"], line["why"]]
                for line in others
            ],
        )
