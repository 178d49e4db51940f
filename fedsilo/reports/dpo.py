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

    Args:
        run: the run, with the numbers that may be shown.
        log: a hospital's own audit log; None for a page without it.

    Returns:
        A dictionary with these keys:

        - ``sizes``, ``by_class``, ``failed`` and further keys of ``taking_part``: the sites, their
          data and their failures.
        - ``head``: a description of the run, the main result and its main limitation.
        - ``trust``: the level of trust.
        - ``bounded``: whether epsilon bounds everything that sites send.
        - ``flow`` and ``leaves``: a picture and sentences on the data that leave a site.
        - ``perturbation``: sentences on noise without a privacy guarantee.
        - ``byte_columns`` and ``bytes``: a table of the bytes that each site sent and received.
        - ``measurements``, ``measurement_columns`` and ``sent_at_end``: a table that counts the
          metrics that each site sent.
        - ``arrays``: a table of the server's final model; None without a model file.
        - ``guarantee``: the differential privacy; None without it.
        - ``log``: a summary of the log's lines about the run; None without a log.
        - ``processing``: the rows for the record of processing.

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
    """Build ``result`` and ``limit`` for the head of the data protection officer's page.

    ``result`` is a sentence with the number of hospitals, the number of messages, and the bytes
    sent. With differential privacy, it also gives the epsilon per patient. ``limit`` is a sentence
    on what the answers may still reveal. If a site has hidden counts, the bytes are an upper bound.
    With a single site, they are then "not shown".

    Args:
        run: the run.
        privacy: the entry ``privacy`` of the run's summary.
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

    The first of these cases that applies decides the sentence:

    1. Without differential privacy, nothing bounds what the answers reveal.
    2. With simulated sites, the noise protects nobody, because it comes from the seed.
    3. At trust level ``server`` or ``sums``, measurements and label counts left without noise.
    4. At trust level ``nobody``, epsilon bounds what is learnt about a patient, not a hospital.

    Args:
        run: the run.
        spent: the largest epsilon of a site, or an empty text without differential privacy. The
            sentence does not state the number.
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

    The size of a site's replies could reveal a hidden count of samples. A bound over several sites
    does not. With a single site, the bound would be that site's true number.

    Args:
        run: the run.
        most: the bound as text, such as the largest number of any site.

    Returns:
        "up to" and ``most``, or "not shown" if the run has a single site.
    """
    if len(run.silos) > 1:
        return f"up to {most}"
    return "not shown"


def _sent_bytes(run: Shown) -> dict[str, dict[str, int]]:
    """Add up the bytes that each site sent in each phase: site -> phase -> bytes.

    For a site with hidden counts, each number is replaced by the largest number of any site in that
    phase. The true number would reveal the hidden counts, because a reply is smaller if fewer
    classes have enough samples. Sites are sorted by name.
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
        if site in run.floors.sites_with_hidden_counts:
            shown[site] = {phase: most[phase] for phase in by_phase}
    return shown


def _bytes(run: Shown) -> dict[str, Any]:
    """Build the template variables for the table of bytes: ``byte_columns`` and ``bytes``.

    ``byte_columns`` has the headings, and ``bytes`` has a row per site. A row gives the site's
    name, its number of messages, the bytes sent in each phase ("-" if none), all bytes sent, and
    all bytes received. If a site has hidden counts, its sent bytes are only given as an upper
    bound.
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

    ``measurements`` has a row for each metric and a column for each site, under the headings
    ``measurement_columns``. Metrics such as ``class.1.right`` are counted together as ``class``.
    ``sent_at_end`` is a text with the names of these groups.

    A site with hidden counts shows "up to" the largest number of any site for metrics by class,
    because its true number would reveal the counts. If it is the only site, these rows are left
    out.
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

    A kind has the same name as in the audit log, so that both can be compared. The cells are the
    kind, the number of arrays, the number of values, and the bytes at four bytes per value. The
    result is None if the run directory has no ``model.safetensors``.
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

    Args:
        guarantee: the entry ``guarantee`` of the run's privacy summary: a mapping, or the text
            ``NO_PRIVACY``.

    Returns:
        None if the run has no guarantee. Otherwise, ``facts`` has pairs (name, text): the largest
        epsilon of a site, the delta, the clipping norm, two settings of the noise, the mechanism
        and the accountant. ``sites`` has a row with each site and its epsilon.
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

    - ``site``: the name of the site.
    - ``lists``: a pair (key, entries) for each of 'methods', 'datasets', 'records' and
      'refused-records'. The first three lists name what the hospital allows, and the last one names
      what it refuses. The entries are one text, which is "nothing" for an empty list.
    - ``limits``: a row for each other rule except the path of the audit log. The cells are the key,
      the value, the origin ("site file" or "default") and the meaning.
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
    """Summarise a hospital's audit log: the messages of the run and the data that left with them.

    Returns:
        Template variables. These cover only the lines about the run: ``count``, the times ``first``
        and ``last``, ``outcomes``, the bytes ``sent`` and ``received``, the table ``records`` of
        the data that left, and the table ``unanswered`` of the messages without an answer. Two
        cover the whole log: ``torn`` counts incomplete lines, and ``breaks`` describes changes of
        the log.

    Raises:
        DataError: no line of the log is about the run.
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

    A record is a part of a message, such as its metrics or its arrays. Rows are sorted, with one
    for each combination of site, kind of message and record. A row also gives the number of such
    messages and the number of entries that their records have in total.
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
