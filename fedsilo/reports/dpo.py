"""The report for a data protection officer: the data sent by each hospital, and their bounds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsilo.client_app.site.audit_log import ANSWERED, group_names
from fedsilo.client_app.site.log_chain import find_breaks
from fedsilo.client_app.site.policy import SiteFile
from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import ARRAYS, METRICS
from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import NOBODY
from fedsilo.core.settings_schema import key_of, keys_of, rules_of
from fedsilo.pages.page import at_most
from fedsilo.reports.flows import picture, sentences, shortened
from fedsilo.reports.hospital_files import AuditLog
from fedsilo.reports.processing_record import processing_rows
from fedsilo.reports.run_facts import head_of, taking_part, value_text
from fedsilo.runs.finished_run import Shown
from fedsilo.server_app.records.progress import bytes_text
from fedsilo.server_app.records.shown import rests_on_classes
from fedsilo.server_app.records.summary import NO_PRIVACY

_LISTS = ("methods", "datasets", "records", "refused_records")
_AMOUNTS = ("delta", "sample-clip-norm", "noise-multiplier", "statistics-noise")
_NO_LIMITS = ("site", "audit_log")


def dpo_data(run: Shown, log: AuditLog | None) -> dict[str, Any]:
    """Build the template variables of ``dpo.html``, the page for a data protection officer.

    They describe the run, its sites, the data that left each site, the noise and its guarantee, and
    the record of processing. ``log`` sums up the hospital's own audit log, and is None without one.

    Raises:
        DataError: no line of the log is about the run.
    """
    privacy = run.summary["privacy"]
    log_data = None
    if log:
        log_data = _log(run, log)
    return {
        **taking_part(run),
        "head": head_of(run) | _head(run, privacy),
        "trust": privacy["trust"],
        "flow": picture(run.trust, len(run.silos), _epsilon(privacy)),
        # Epsilon bounds only weights, class means and prototypes at other levels of trust
        "bounded": run.trust == NOBODY,
        "leaves": sentences(run.trust, privacy["leaves each site"], run.task),
        "perturbation": list(shortened(privacy.get("perturbation", ""))),
        **_bytes(run),
        **_measurements(run),
        "arrays": _arrays(run),
        "guarantee": _guarantee(privacy["guarantee"]),
        "log": log_data,
        "processing": processing_rows(run),
    }


def _head(run: Shown, privacy: Mapping[str, Any]) -> dict[str, str]:
    """Build the sentences ``result`` and ``limit`` for the head of the page.

    ``result`` gives the numbers of hospitals and messages, the bytes sent, and any epsilon per
    patient. Hidden counts make the bytes an upper bound. ``limit`` says what the answers may still
    reveal.
    """
    sites = format_count(len(run.silos), "hospital")
    messages = format_count(len(run.traffic_rows), "message")
    total = 0
    # The sum of the shown numbers, because a true total would reveal the hidden ones
    for by_phase in _sent_bytes(run).values():
        total += sum(by_phase.values())
    sent = bytes_text(total)
    if run.floors.sites_with_hidden_counts:
        sent = _bound(run, sent)
    spent = _epsilon(privacy)
    bound = ""
    if spent:
        bound = f"; epsilon per patient is at most {spent}"
        if run.trust != NOBODY:
            bound += " (only for weights, class means and prototypes)"
    return {
        "result": f"{sites} answered {messages}; sent: {sent}{bound}.",
        "limit": _limit(run, spent),
    }


def _limit(run: Shown, spent: str) -> str:
    """Write the sentence on the limits of epsilon's protection, for the head of the page.

    The first case that applies decides: no differential privacy, simulated sites, a trust level
    other than ``nobody``, or ``nobody``. ``spent`` is empty without differential privacy, and is
    not shown.
    """
    if not spent:
        return "Nothing bounds what these answers reveal about one patient."
    if run.is_simulated:
        return "The hospitals were simulated: the noise comes from the seed and protects nobody."
    if run.trust != NOBODY:
        return "Measurements and label counts left without noise: nothing bounds what they reveal."
    return "Epsilon bounds what is learnt about one patient, not about a hospital as a whole."


def _epsilon(privacy: Mapping[str, Any]) -> str:
    """Format the largest epsilon that a site spent; empty without differential privacy."""
    guarantee = privacy["guarantee"]
    if guarantee == NO_PRIVACY:
        return ""
    return at_most(guarantee["epsilon"])


def _bound(run: Shown, most: str) -> str:
    """Format a number of sent bytes as an upper bound, because a site has hidden counts.

    The text is "up to" and ``most``. For a run with a single site, it is "not shown", because the
    bound would be the true number.
    """
    if len(run.silos) > 1:
        return f"up to {most}"
    return "not shown"


def _sent_bytes(run: Shown) -> dict[str, dict[str, int]]:
    """Add up the bytes that each site sent in each phase: site -> phase -> bytes.

    A site with hidden counts gets the largest number of any site in that phase, because the true
    number could reveal the counts.
    """
    sent: dict[str, Counter[str]] = {}
    for row in run.traffic_rows:
        sent.setdefault(row["site"], Counter())[row["phase"]] += int(row["bytes_up"])
    most = Counter[str]()
    for by_phase in sent.values():
        most |= by_phase  # the larger number of each phase
    shown: dict[str, dict[str, int]] = {}
    for site, by_phase in sorted(sent.items()):
        shown[site] = dict(by_phase)
        # A reply is smaller if fewer classes have enough samples
        if site in run.floors.sites_with_hidden_counts:
            shown[site] = {phase: most[phase] for phase in by_phase}
    return shown


def _bytes(run: Shown) -> dict[str, Any]:
    """Build the template variables for the table of bytes: ``byte_columns`` and ``bytes``.

    A row gives the site, its messages, the bytes sent in each phase and in total, and the bytes
    received. Sent bytes of a site with hidden counts are an upper bound.
    """
    received, messages = Counter[str](), Counter[str]()
    phases: dict[str, None] = {}
    for row in run.traffic_rows:
        received[row["site"]] += int(row["bytes_down"])
        messages[row["site"]] += 1
        phases[row["phase"]] = None
    rows = []
    for site, sent in _sent_bytes(run).items():
        hidden = site in run.floors.sites_with_hidden_counts
        cells = [site, str(messages[site])]
        for phase in phases:
            cells.append(_sent_cell(run, sent[phase], hidden) if phase in sent else "-")
        cells.append(_sent_cell(run, sum(sent.values()), hidden))
        cells.append(bytes_text(received[site]))
        rows.append(cells)
    columns = ["site", "messages"]
    for phase in phases:
        columns.append(f"left in '{phase}'")
    columns += ["sent in all", "received in all"]
    return {"byte_columns": columns, "bytes": rows}


def _sent_cell(run: Shown, number: int, hidden: bool) -> str:
    """Format a number of sent bytes. If ``hidden`` is True, show it only as an upper bound."""
    text = bytes_text(number)
    if hidden:
        return _bound(run, text)
    return text


def _measurements(run: Shown) -> dict[str, Any]:
    """Build the template variables for the table that counts the metrics each site sent.

    Metrics such as ``class.1.right`` are counted together as ``class``, and ``sent_at_end`` names
    these groups. A site with hidden counts shows only an upper bound for metrics by class.
    """
    measured = Counter[tuple[str, str]]()
    sites, names, families = set(), set(), set()
    for row in run.sent:
        name = row["metric"].partition(".")[0]  # 'class' of 'class.1.right'
        measured[row["site"], name] += 1
        sites.add(row["site"])
        names.add(name)
        if "." in row["metric"]:
            families.add(name)
    hiding = run.floors.sites_with_hidden_counts
    rows = []
    for name in sorted(names):
        by_class = rests_on_classes(name)
        if by_class and hiding and len(run.silos) == 1:
            continue  # the most of any site would be the site's own number
        # Sites with hidden counts show this upper bound, other sites their own number
        most = max(measured[site, name] for site in sites)
        cells = [name]
        for site in sorted(sites):
            if by_class and site in hiding:
                cells.append(f"up to {most}")
            else:
                cells.append(str(measured[site, name]))
        rows.append(cells)
    return {
        "measurement_columns": [METRICS, *sorted(sites)],
        "measurements": rows,
        "sent_at_end": ", ".join(sorted(families)),
    }


def _arrays(run: Shown) -> list[list[str]] | None:
    """Describe the arrays of the server's final model in a table, with a row for each kind.

    The cells are the kind, as in the audit log, and the numbers of arrays, values and bytes. The
    result is None without the file ``model.safetensors``.
    """
    path = run.path / "model.safetensors"
    if not path.is_file():
        return None
    arrays, _ = load_state(path)
    counts, values = Counter[str](), Counter[str]()
    for name, array in arrays.items():
        # The kinds are named as in the audit log, so that an officer can compare them
        (kind,) = group_names([f"{ARRAYS}/{name}"])
        counts[kind] += 1
        values[kind] += int(np.size(array))
    rows = []
    for kind in sorted(counts):
        size = bytes_text(4 * values[kind])  # a float32 value has 4 bytes
        rows.append([kind, str(counts[kind]), f"{values[kind]:,}", size])
    return rows


def _guarantee(guarantee: Any) -> Mapping[str, Any] | None:
    """Build the template variables for a run's guarantee of differential privacy.

    ``facts`` has pairs (name, text), first the largest epsilon of a site. ``sites`` has the epsilon
    of each site. If ``guarantee`` is ``NO_PRIVACY``, the result is None.
    """
    if guarantee == NO_PRIVACY:
        return None
    facts = [("epsilon", f"{at_most(guarantee['epsilon'])}, of the site that spent most")]
    for name in _AMOUNTS:
        facts.append((name, f"{guarantee[name]:g}"))
    for name in ("mechanism", "accountant"):
        facts.append((name, guarantee[name]))
    sites = []
    for site, spent in guarantee["sites"].items():
        sites.append([site, at_most(spent)])
    return {"facts": facts, "sites": sites}


def site_file_data(file: SiteFile) -> dict[str, Any]:
    """Build the template variables of the section on a site file, which holds a hospital's rules.

    ``lists`` has the key and the entries of each list, such as the allowed methods. An empty list
    is shown as "nothing". ``limits`` has a row for each other rule: the key, the value, the origin
    ("site file" or "default") and the meaning.
    """
    lists = []
    for name in _LISTS:
        lists.append((key_of(name), ", ".join(getattr(file, name)) or "nothing"))
    rules = rules_of(SiteFile)
    limits = []
    for name, key in keys_of(SiteFile).items():
        # The lists above are not rules; the site's name and the log are not limits
        if key in rules and name not in _NO_LIMITS:
            origin = "default"
            if key in file.given:
                origin = "site file"
            value = value_text(getattr(file, name))
            limits.append([key, value, origin, rules[key].help])
    return {"site": file.site or "the site", "lists": lists, "limits": limits}


def _log(run: Shown, log: AuditLog) -> dict[str, Any]:
    """Build the template variables that sum up a hospital's audit log.

    ``torn`` counts incomplete lines, and ``breaks`` describes changes of the whole log. All other
    variables cover only the lines about the run. If there are none, a DataError is raised.
    """
    lines = log.of_run(str(run.settings.common.run_name))
    outcomes = Counter[str]()
    sent = received = 0
    for line in lines:
        outcomes[str(line["outcome"])] += 1
        sent += line["bytes-out"]
        received += line["bytes-in"]
    by_outcome = []
    for outcome, count in sorted(outcomes.items()):
        by_outcome.append(f"{count} {outcome}")
    return {
        "count": len(lines),
        "first": lines[0]["time"],
        "last": lines[-1]["time"],
        "outcomes": ", ".join(by_outcome),
        "sent": bytes_text(sent),
        "received": bytes_text(received),
        "torn": log.torn,
        "breaks": list(find_breaks(log.lines, log.head)),
        "records": _record_rows(lines),
        "unanswered": _unanswered_rows(lines),
    }


def _record_rows(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Build a table of the records that left the hospital, according to its audit log.

    A record is a part of a message, such as its metrics. Each site, kind of message and record has
    a row with its numbers of messages and entries.
    """
    messages, entries = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for line in lines:
        for record, count in line["records"].items():
            key = (line["site"], line["kind"], record)
            messages[key] += 1
            entries[key] += count
    rows = []
    for key in sorted(entries):
        rows.append([*key, str(messages[key]), str(entries[key])])
    return rows


def _unanswered_rows(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Build a row for each message whose outcome in the audit log is not "answered".

    The cells are the time, the site, the round, the outcome and the reason.
    """
    rows = []
    for line in lines:
        if line["outcome"] != ANSWERED:
            round_ = str(line["round"])
            rows.append([line["time"], line["site"], round_, line["outcome"], line["why"]])
    return rows
