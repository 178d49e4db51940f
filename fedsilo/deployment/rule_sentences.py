"""A hospital's rules in sentences: what a run may ask and may not ask, and what leaves.

Every key of the site file has its sentence in ``SENTENCES``, which a test checks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Context

from fedsilo.client_app.site.policy import NODE_LIMITS, SITE_FILE, SiteFile, read_site_file
from fedsilo.client_app.site.trust import MEANINGS, refuse_uncapped
from fedsilo.core.settings_schema import as_mapping, build, keys_of

_ALL = ("*",)
_OF_A_FILE = ("site", "audit-log")  # meaningless without a site file
_ELSE = "else"
_IN_GIGABYTES = ("max-memory", "max-state", "max-cache")  # keys that the file gives in megabytes


def effective(context: Context) -> SiteFile:
    """Return the rules that hold at a site: the stricter of its site file and its node config.

    Without a site file, everything is allowed that needs no consent.

    Raises:
        RefusedError: the site file is unusable, or lacks a cap although the site trusts nobody.
        SettingError: the node config has a wrong value.
    """
    rules = SiteFile(methods=_ALL, datasets=_ALL, records=_ALL)
    if SITE_FILE in context.node_config:
        rules = read_site_file(context)
    merged = rules.restrict(context).node_config
    limits = build(SiteFile, {key: merged[key] for key in NODE_LIMITS if key in merged})
    refuse_uncapped(limits.trust, limits.max_epsilon > 0)
    stricter = {}
    for name, key in keys_of(SiteFile).items():
        if key in NODE_LIMITS:
            stricter[name] = getattr(limits, name)
    return replace(rules, **stricter)


def explain_rules(rules: SiteFile, has_file: bool = True) -> list[str]:
    """Explain the rules, one sentence per key.

    Args:
        rules: the rules that hold at the site.
        has_file: whether the site has a site file; without one there is no audit log.
    """
    values: Mapping[str, Any] = as_mapping(rules)
    sentences = []
    for key in SENTENCES:
        if has_file or key not in _OF_A_FILE:
            sentences.append(said_of(key, values[key]))
    if not has_file:
        sentences.append("without a site file there is no audit log")
    return sentences


def said_of(key: str, value: Any) -> str:
    """Return the sentence for a key and its value."""
    if isinstance(value, tuple):
        value = "*" if "*" in value else ", ".join(value)
    form = SENTENCES[key]
    if not isinstance(form, str):
        form = form.get(value, form[_ELSE])
    if key in _IN_GIGABYTES:
        value /= 1000
    return form.format(value)


# One sentence, or one for each value; {} stands for the value
SENTENCES: Mapping[str, str | Mapping[Any, str]] = {
    "site": {"": "the file names no site", _ELSE: "the file is for site {}"},
    "app": {
        "installed": (
            "a run is answered by the fedsilo that is installed here, if it has the same"
        ),
        _ELSE: "a run may bring any code along, and that code may pass by all that follows",
    },
    "trust": {**MEANINGS, _ELSE: "the site takes no part: it does not say whom it trusts"},
    "methods": {
        "": "a run may not ask for any method",
        "*": "a run may ask for any method",
        _ELSE: "a run may ask for method {}, for no other",
    },
    "datasets": {
        "": "a run may not ask for any data set",
        "*": "a run may ask for any data set",
        _ELSE: "a run may ask for data set {}, for no other",
    },
    "max-rounds": {
        0: "a run may have any number of rounds, as far as its messages go",
        _ELSE: "a run may not have more than {} rounds",
    },
    "allow-folds": {
        True: "a run may choose which samples train, validate and test",
        _ELSE: "a run may not choose which samples train, validate and test",
    },
    "allow-embeddings": {
        True: "a run may ask for embeddings or attention maps of single images",
        _ELSE: "a run may not ask for embeddings or attention maps of single images",
    },
    "allow-folder-names": {
        True: "a run may take the names of folders of images for classes, and gets them",
        _ELSE: "a run may not take the names of folders of images for classes",
    },
    "secure-aggregation": {
        "required": (
            "a run may not send weights but masked, of which the server learns sums alone"
        ),
        _ELSE: "a run need not mask weights",
    },
    "max-epsilon": {
        0: "there is no cap on epsilon over all runs",
        _ELSE: "all runs together may not tell more than epsilon {:g}",
    },
    "delta": "epsilon is taken at delta {:g}",
    "counts-noise": {
        0: "counts of samples have noise that costs a quarter of that",
        _ELSE: "counts of samples have noise of a deviation of {:g} patients",
    },
    "minimum-clip-norm": "a run may not have a patient's part clipped to a norm below {:g}",
    "maximum-clip-norm": "a run may not have a patient's part clipped to a norm above {:g}",
    "minimum-noise": "a run may not have noise of a deviation below {:g} patients' parts",
    "maximum-noise": "a run may not have noise of a deviation above {:g} patients' parts",
    "minimum-train-samples": {
        0: "the site takes part with any number of training samples",
        _ELSE: "the site takes no part with fewer than {} training samples",
    },
    "minimum-per-label": {
        0: "the site takes part with any number of training samples of a label that it has",
        _ELSE: "the site takes no part with fewer than {} training samples of a label that it has",
    },
    "minimum-batch": "a run may not take an optimiser step on fewer than {} samples",
    "minimum-steps-per-reply": "leaves nothing that was trained in fewer than {} steps",
    "minimum-measured": "leaves no measurement of a split of fewer than {} samples",
    "sums-min-count": "leaves no sum, mean or count of fewer than {} samples",
    "colluding-sites": "a secure sum hides the site from a server that works with {} other sites",
    "secure-samples": "in a secure sum the site counts as one of at most {} samples",
    "clip-norm": "a run of sums may not clip updates to another norm than {:g}",
    "records": {
        "": "nothing leaves but refusals",
        "*": "all that a method sends leaves, within what follows",
        _ELSE: "of what a method sends leaves only {}",
    },
    "refused-records": {
        "": "nothing of that is withheld by its name",
        _ELSE: "never leaves {}",
    },
    "max-messages": "a run may not send more than {} messages",
    "max-repeats": "a run may ask the same {} times, not more often",
    "max-runs-per-day": "not more than {} new runs begin in 24 hours",
    "max-seconds": "a run may not take more than {:g} seconds of work",
    "max-memory": {
        0: "a message may take nine tenths of the machine's memory",
        _ELSE: "a message may not take more than {:g} GB of memory",
    },
    "max-state": "runs may leave {:g} GB of private states here",
    "max-cache": "decoded data may take {:g} GB here",
    "audit-log": {
        "": "each message has a line in the audit log in the state-dir before its reply leaves",
        _ELSE: "each message has a line in {} before its reply leaves",
    },
}
