"""A report for a data protection officer: what left each hospital, how much, and what bounds it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from fedsilo.client_app.site.audit_log import ANSWERED, group_names
from fedsilo.client_app.site.policy import SiteFile
from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import ARRAYS, METRICS
from fedsilo.core.one_line import counted
from fedsilo.core.settings.common_settings import NOBODY
from fedsilo.core.settings_schema import Value, key_of
from fedsilo.pages.number_texts import at_most
from fedsilo.reports.flows import picture, sentences, shortened
from fedsilo.reports.headline import head_of
from fedsilo.reports.hospital_files import AuditLog
from fedsilo.reports.runs import taking_part
from fedsilo.runs.finished_run import Shown
from fedsilo.runs.shown import rests_on_classes
from fedsilo.server_app.records.progress import bytes_text
from fedsilo.server_app.records.summary import NO_PRIVACY

_LISTS = ("methods", "datasets", "records", "refused_records")
_AMOUNTS = ("delta", "sample-clip-norm", "noise-multiplier", "statistics-noise")
_NO_LIMITS = ("site", "audit_log")


def dpo_data(run: Shown, log: AuditLog | None) -> dict[str, Any]:
    """Build the template variables of ``dpo.html``, with a hospital's own log if one is given."""
    privacy = run.summary["privacy"]
    return {
        **taking_part(run),
        "head": head_of(run) | _head(run, privacy),
        "trust": privacy["trust"],
        "flow": picture(run.trust, len(run.silos), _epsilon(privacy)),
        "bounded": run.trust == NOBODY,  # all that leaves, or weights and means alone
        "leaves": sentences(run.trust, privacy["leaves each site"]),
        "perturbation": [*shortened(privacy.get("perturbation", ""))],
        **_bytes(run),
        **_measurements(run),
        "arrays": _arrays(run),
        "guarantee": _guarantee(privacy["guarantee"]),
        "log": log and _log(run, log),
    }


def _head(run: Shown, privacy: Mapping[str, Any]) -> dict[str, str]:
    """Return result and main limit as a data protection officer reads them."""
    sites, messages = counted(len(run.silos), "hospital"), counted(len(run.traffic_rows), "message")
    sent = bytes_text(sum(sum(by_kind.values()) for by_kind in _sent(run).values()))
    said, spent = (
        _bound(run, sent) if run.floors.sites_with_hidden_counts else sent,
        _epsilon(privacy),
    )
    of = "" if run.trust == NOBODY else ", of weights, class means and prototypes alone"
    bound = f"; epsilon per patient is at most {spent}{of}" if spent else ""
    return {
        "result": f"{sites} answered {messages}; sent: {said}{bound}.",
        "limit": _limit(run, spent),
    }


def _limit(run: Shown, spent: str) -> str:
    if not spent:
        return "Nothing bounds what these answers reveal about one patient."
    if run.is_simulated:
        return "The hospitals were simulated: the noise comes from the seed and protects nobody."
    if run.trust != NOBODY:
        return "Measurements and label counts left without noise: nothing bounds what they reveal."
    return "Epsilon bounds what is learnt about one patient, not about a hospital as a whole."


def _epsilon(privacy: Mapping[str, Any]) -> str:
    guarantee = privacy["guarantee"]
    return "" if guarantee == NO_PRIVACY else at_most(guarantee["epsilon"])


def _bound(run: Shown, most: str) -> str:
    """Bound the bytes of a hidden site by the largest number of any site.

    With a single site, the bound is its own number.
    """
    return f"up to {most}" if len(run.silos) > 1 else "not shown"


def _sent(run: Shown) -> dict[str, dict[str, int]]:
    """Return site -> kind of message -> bytes; of a hiding site the most of any site."""
    up, most, hiding = (
        dict[str, Counter[str]](),
        Counter[str](),
        run.floors.sites_with_hidden_counts,
    )
    for row in run.traffic_rows:
        up.setdefault(row["site"], Counter())[row["phase"]] += int(row["bytes_up"])
    for sent in up.values():
        most |= sent
    return {
        site: {phase: most[phase] if site in hiding else n for phase, n in sent.items()}
        for site, sent in sorted(up.items())
    }


def _bytes(run: Shown) -> dict[str, Any]:
    down, messages, hiding = Counter[str](), Counter[str](), run.floors.sites_with_hidden_counts
    for row in run.traffic_rows:
        down[row["site"]] += int(row["bytes_down"])
        messages[row["site"]] += 1
    phases = list(dict.fromkeys(row["phase"] for row in run.traffic_rows))
    rows = []
    for site, sent in _sent(run).items():
        texts = {phase: bytes_text(n) for phase, n in (sent | {"": sum(sent.values())}).items()}
        if site in hiding:
            texts = {phase: _bound(run, text) for phase, text in texts.items()}
        cells = [texts.get(phase, "-") for phase in (*phases, "")]
        rows.append([site, str(messages[site]), *cells, bytes_text(down[site])])
    left = (f"left in '{phase}'" for phase in phases)
    columns = ["site", "messages", *left, "sent in all", "received in all"]
    return {"byte_columns": columns, "bytes": rows}


def _measurements(run: Shown) -> dict[str, Any]:
    measured = Counter((row["site"], row["metric"].partition(".")[0]) for row in run.sent)
    sites, hiding = sorted({site for site, _ in measured}), run.floors.sites_with_hidden_counts
    names = sorted({name for _, name in measured})
    if hiding and len(run.silos) == 1:  # also that there is no such row would say it
        names = [name for name in names if not rests_on_classes(name)]

    def cell(site: str, name: str) -> str:
        if site in hiding and rests_on_classes(name):
            return f"up to {max(measured[other, name] for other in sites)}"
        return str(measured[site, name])

    return {
        "measurement_columns": [METRICS, *sites],
        "measurements": [[name, *(cell(site, name) for site in sites)] for name in names],
    }


def _arrays(run: Shown) -> list[list[str]] | None:
    """Return a row per kind of array of the final model, or None if the server holds no model."""
    path = run.path / "model.safetensors"
    if not path.is_file():
        return None
    arrays, _ = load_state(path)
    values, groups = Counter[str](), group_names(f"{ARRAYS}/{name}" for name in arrays)
    for name, array in arrays.items():
        values[next(iter(group_names([f"{ARRAYS}/{name}"])))] += int(np.size(array))
    return [
        [name, str(count), f"{values[name]:,}", bytes_text(4 * values[name])]
        for name, count in sorted(groups.items())
    ]


def _guarantee(guarantee: Any) -> Mapping[str, Any] | None:
    if guarantee == NO_PRIVACY:
        return None
    return {
        "facts": [
            ("epsilon", f"{at_most(guarantee['epsilon'])}, of the site that spent most"),
            *((name, f"{guarantee[name]:g}") for name in _AMOUNTS),
            *((name, guarantee[name]) for name in ("mechanism", "accountant")),
        ],
        "sites": [[site, at_most(spent)] for site, spent in guarantee["sites"].items()],
    }


def site_file_data(file: SiteFile) -> dict[str, Any]:
    """Build the template variables of ``dpo.html`` for a hospital's own site file."""
    limits = [f for f in fields(SiteFile) if "rule" in f.metadata and f.name not in _NO_LIMITS]
    return {
        "site": file.site or "the site",
        "lists": [(key_of(n), ", ".join(getattr(file, n)) or "nothing") for n in _LISTS],
        "limits": [
            [
                key_of(limit.name),
                value_text(getattr(file, limit.name)),
                "site file" if key_of(limit.name) in file.given else "default",
                limit.metadata["rule"].help,
            ]
            for limit in limits
        ],
    }


def value_text(value: Value) -> str:
    """Return a setting's value for people."""
    return str(value).lower() if isinstance(value, bool) else str(value) or "(empty)"


def _log(run: Shown, log: AuditLog) -> dict[str, Any]:
    lines = log.of_run(str(run.settings.common.run_name))
    outcomes = Counter(str(line["outcome"]) for line in lines)
    entries, messages = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for line in lines:
        for record, count in line["records"].items():
            entries[line["site"], line["kind"], record] += count
            messages[line["site"], line["kind"], record] += 1
    return {
        "count": len(lines),
        "first": lines[0]["time"],
        "last": lines[-1]["time"],
        "outcomes": ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())),
        "sent": bytes_text(sum(line["bytes-out"] for line in lines)),
        "received": bytes_text(sum(line["bytes-in"] for line in lines)),
        "torn": log.torn,
        "records": [[*key, str(messages[key]), str(entries[key])] for key in sorted(entries)],
        "unanswered": [
            [line["time"], line["site"], str(line["round"]), line["outcome"], line["why"]]
            for line in lines
            if line["outcome"] != ANSWERED
        ],
    }
