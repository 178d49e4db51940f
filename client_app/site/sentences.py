"""What a hospital allows, in sentences: a run may ask ..., may not ..., and what leaves.

Every key of the site file has its sentence in ``SENTENCES``; a test holds the two together.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from flwr.app import Context

from fedsilo.client_app.site.policy import NODE_LIMITS, SITE_FILE, SiteFile, read_site_file
from fedsilo.client_app.site.trust import MEANINGS
from fedsilo.models.contract.settings_schema import build, key_of

_GIGABYTE = 1000  # megabytes
_ALL = ("*",)
_OF_A_FILE = ("site", "audit-log")  # they say nothing where there is none


def effective(context: Context) -> SiteFile:
    """Return what holds at a site: its site file and its node config, of both the stricter.

    Without a site file everything may be asked for that needs no consent.

    Raises:
        RefusedError: the site file cannot be used.
        SettingError: the node config has a wrong value.
    """
    named = SITE_FILE in context.node_config
    rules = (
        read_site_file(context) if named else SiteFile(methods=_ALL, datasets=_ALL, records=_ALL)
    )
    merged = rules.over(context).node_config
    limits = build(SiteFile, {key: merged[key] for key in NODE_LIMITS if key in merged})
    changed = {f.name: getattr(limits, f.name) for f in fields(SiteFile) if _is_limit(f.name)}
    return replace(rules, **changed)


def _is_limit(name: str) -> bool:
    return key_of(name) in NODE_LIMITS


def explained(rules: SiteFile, has_file: bool = True) -> list[str]:
    """Return what ``rules`` say, a sentence each key.

    Args:
        rules: what holds at the site.
        has_file: whether the site has a site file: only then there is an audit log.
    """
    said = [say(rules) for key, say in SENTENCES.items() if has_file or key not in _OF_A_FILE]
    return said if has_file else [*said, "without a site file there is no audit log"]


def _listed(what: str, names: tuple[str, ...]) -> str:
    if not names:
        return f"a run may not ask for any {what}"
    if "*" in names:
        return f"a run may ask for any {what}"
    return f"a run may ask for {what} {', '.join(names)}, for no other"


def _records(rules: SiteFile) -> str:
    if not rules.records:
        return "nothing leaves but refusals"
    if "*" in rules.records:
        return "all that a method sends leaves, within what follows"
    return f"of what a method sends leaves only {', '.join(rules.records)}"


def _refused(rules: SiteFile) -> str:
    if not rules.refused_records:
        return "of that nothing is held back by its name"
    return f"never leaves {', '.join(rules.refused_records)}"


def _if(value: float, sentence: str, otherwise: str) -> str:
    return sentence if value else otherwise


def _consent(agreed: bool, what: str) -> str:
    return f"a run may {what}" if agreed else f"a run may not {what}"


def _least(count: int, what: str) -> str:
    if not count:
        return f"the site takes part with any number of {what}"
    return f"the site takes no part with fewer than {count} {what}"


def _size(megabytes: int) -> str:
    large = megabytes >= _GIGABYTE
    return f"{megabytes / _GIGABYTE:g} GB" if large else f"{megabytes} MB"


SENTENCES: Mapping[str, Callable[[SiteFile], str]] = {
    "site": lambda r: _if(len(r.site), f"the file is for site {r.site}", "the file names no site"),
    "app": lambda r: (
        "a run is answered by the fedsilo that is installed here, if it has the same"
        if r.app == "installed"
        else "a run may bring any code along, and that code may pass by all that follows"
    ),
    "trust": lambda r: MEANINGS.get(
        r.trust, "the site takes no part: it does not say whom it trusts"
    ),
    "methods": lambda r: _listed("method", r.methods),
    "datasets": lambda r: _listed("data set", r.datasets),
    "max-rounds": lambda r: _if(
        r.max_rounds,
        f"a run may not have more than {r.max_rounds} rounds",
        "a run may have any number of rounds, as far as its messages go",
    ),
    "allow-folds": lambda r: _consent(
        r.allow_folds, "choose which samples train, validate and test"
    ),
    "allow-embeddings": lambda r: _consent(
        r.allow_embeddings, "ask for embeddings or attention maps of single images"
    ),
    "secure-aggregation": lambda r: (
        "a run may not send weights but masked, of which the server learns sums alone"
        if r.secure_aggregation == "required"
        else "a run need not mask weights"
    ),
    "max-epsilon": lambda r: _if(
        r.max_epsilon,
        f"all runs together may not tell more than epsilon {r.max_epsilon:g}",
        "there is no cap on epsilon over all runs",
    ),
    "delta": lambda r: f"epsilon is taken at delta {r.delta:g}",
    "minimum-train-samples": lambda r: _least(r.minimum_train_samples, "training samples"),
    "minimum-per-label": lambda r: _least(
        r.minimum_per_label, "training samples of a label that it has"
    ),
    "minimum-batch": lambda r: (
        f"a run may not take an optimiser step on fewer than {r.minimum_batch} samples"
    ),
    "minimum-steps-per-reply": lambda r: (
        f"leaves nothing that was trained in fewer than {r.minimum_steps_per_reply} steps"
    ),
    "minimum-measured": lambda r: (
        f"leaves no measurement of a split of fewer than {r.minimum_measured} samples"
    ),
    "sums-min-count": lambda r: (
        f"leaves no sum, mean or count of fewer than {r.sums_min_count} samples"
    ),
    "colluding-sites": lambda r: (
        f"a secure sum hides the site from a server that works with {r.colluding_sites} other sites"
    ),
    "records": _records,
    "refused-records": _refused,
    "max-messages": lambda r: f"a run may not send more than {r.max_messages} messages",
    "max-repeats": lambda r: f"a run may ask the same {r.max_repeats} times, not more often",
    "max-runs-per-day": lambda r: f"not more than {r.max_runs_per_day} new runs begin in 24 hours",
    "max-seconds": lambda r: f"a run may not take more than {r.max_seconds:g} seconds of work",
    "max-memory": lambda r: (
        f"a message may not take more than {_size(r.max_memory)} of memory"
        if r.max_memory
        else "a message may take nine tenths of the machine's memory"
    ),
    "max-state": lambda r: f"runs may leave {_size(r.max_state)} of private states here",
    "max-cache": lambda r: f"decoded data may take {_size(r.max_cache)} here",
    "audit-log": lambda r: (
        f"each message has a line in {r.audit_log or 'the audit log in the state-dir'} before its "
        "reply leaves"
    ),
}
