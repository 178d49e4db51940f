"""A hospital's rules: the file ``site.yaml``, written at the hospital, and the rules in sentences.

Rules never come from a kit, because then whoever made or carried the kit would decide what this
hospital allows. Every key of the site file has its sentence in ``SENTENCES``, which a test checks.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Context

from fedsilo.client_app.site.policy import NODE_LIMITS, SITE_FILE, SiteFile, read_site_file
from fedsilo.client_app.site.site_file import read_rules
from fedsilo.client_app.site.trust import MEANINGS, refuse_uncapped
from fedsilo.core.arguments import several
from fedsilo.core.errors import FedsiloError, SettingError
from fedsilo.core.files.yaml_text import YamlError, parse_yaml, with_numbers
from fedsilo.core.one_line import one_line
from fedsilo.core.settings_schema import as_mapping, build, keys_of
from fedsilo.deployment.options import RuleOptions

SITE = "site.yaml"
_ALL = ("*",)
_OF_A_FILE = ("site", "audit-log")  # meaningless without a site file
_ELSE = "else"
_IN_GIGABYTES = ("max-memory", "max-state", "max-cache")  # keys that the file gives in megabytes
_HEAD = """\
# The rules of this hospital. docs/site-file.md explains the keys; docs/examples/site.yaml has all.
# In lists, ["*"] allows everything and [] nothing. Changes apply from the next message on.
"""


class RulesError(FedsiloError):
    """A hospital's rules cannot be used, or contradict the options of its start.

    Fix: correct the site file that the message names, or the options of ``fedsilo hospital
    start``.
    """

    code = "rules"


def read_rules_given(options: RuleOptions) -> dict[str, Any]:
    """Read the rules that are given as options of a hospital's start, by key of the site file.

    The options ``trust``, ``method`` and ``dataset`` become the keys 'trust', 'methods' and
    'datasets' (lists). Each text KEY=VALUE in ``rule`` adds a key, whose value is parsed as YAML.
    Options that were not given are left out. Unknown keys are accepted.

    Raises:
        SettingError: a rule lacks '=' or its key, the key is given twice or is 'site', or the
            value is not valid YAML.
    """
    values: dict[str, Any] = {}
    if options.get("trust"):
        values["trust"] = options["trust"]
    for key, names in (("methods", options.get("method")), ("datasets", options.get("dataset"))):
        if several(names):
            values[key] = several(names)
    for text in several(options.get("rule")):
        key, equals, value = text.partition("=")
        key = key.strip()
        fault = ""
        if not equals or not key:
            fault = f"--rule is '{one_line(text)}', but must be KEY=VALUE"
        # The later of two values would win in silence, and it may be the laxer rule
        elif key in values or key == "site":
            fault = f"--rule {key} is already set by another option or rule: remove one"
        try:
            values[key] = with_numbers(parse_yaml(value))
        except YamlError as error:
            fault = fault or f"--rule {key}: {error}"
        if fault:
            raise SettingError(fault)
    return values


def write_rules(site: str, options: RuleOptions) -> str:
    """Build the text of a hospital's first site file from the options of its start.

    The text is YAML, with one line for each key: the site's name, the level of trust, the other
    given rules. Unless the options restrict them, all methods, all data sets and all records are
    allowed. The text must give the same rules when it is parsed. No file is written.

    Raises:
        RulesError: no level of trust is given, or an option cannot be used.
    """
    rules: dict[str, Any] = {"site": site, "trust": ""}
    for key in ("methods", "datasets", "records"):
        rules[key] = list(_ALL)
    text = fault = ""
    try:
        rules |= read_rules_given(options)
        text = _HEAD
        for key, value in rules.items():
            text += f"{key}: {json.dumps(value)}\n"
        if not rules["trust"]:
            fault = _no_trust(site)
        # The rules that will be read from the file apply, so they must equal the given rules
        elif with_numbers(parse_yaml(text)) != rules:
            fault = f"{site}: a value of --rule would change in {SITE}: write the file by hand"
        else:
            read_rules(text, SiteFile)
    except (SettingError, YamlError) as error:
        fault = f"{site}: these rules cannot be used: {error}"
    if fault:
        raise RulesError(fault)
    return text


def check_rules(
    text: str, site: str, options: RuleOptions, trusted_elsewhere: bool = False
) -> SiteFile:
    """Parse the hospital's own site file, and check that no option contradicts it.

    An option is accepted if the file has the same key with the same value, because a service
    manager may give the same options at each start. Any other option contradicts the file.

    Args:
        text: the file's text.
        site: the hospital's name.
        options: the command's options.
        trusted_elsewhere: whether the node config has the level of trust.

    Returns:
        The file's rules. Options do not change them.

    Raises:
        RulesError: the file or an option cannot be used, the file belongs to another site, an
            option contradicts the file, or neither the file nor the node config has a level of
            trust.
    """
    try:
        content = with_numbers(parse_yaml(text))
        rules: SiteFile = read_rules(text, SiteFile)
        given = read_rules_given(options)
    except (SettingError, YamlError) as error:
        raise RulesError(f"{site}: {SITE} cannot be used: {error}") from None
    fault = ""
    # The file is never changed by an option: an operator could widen the hospital's rules by a
    # typing slip
    for key, value in given.items():
        if content.get(key) != value:
            fault = (
                f"{site}: {SITE} has {_show_value(content, key)}, but the option says "
                f"{json.dumps(value)}: edit the file, or remove the option"
            )
    if rules.site not in ("", site):
        fault = f"{site}: {SITE} is for '{rules.site}', not for {site}"
    elif not fault and not rules.trust and not trusted_elsewhere:
        fault = _no_trust(site)
    if fault:
        raise RulesError(fault)
    return rules


def _no_trust(site: str) -> str:
    return (
        f"{site} has no level of trust: give --trust with one of {', '.join(MEANINGS)}, or add a "
        f"line 'trust' to {SITE}"
    )


def _show_value(content: Mapping[str, Any], key: str) -> str:
    if key not in content:
        return f"no '{key}'"
    return f"'{key}' {json.dumps(content[key], default=str)}"


def effective_rules(context: Context) -> SiteFile:
    """Return the rules that apply at a site, from its site file and its node config.

    If both set the same limit, the stricter value applies. Without a site file, all methods, data
    sets and records are allowed, but the limits in the node config still apply.

    Args:
        context: Flower's context of the site, whose node config may name a site file.

    Raises:
        RefusedError: the site file cannot be used, or the level of trust is ``nobody`` (all that
            leaves must be differentially private) without a cap on epsilon.
        SettingError: the node config has a value that cannot be used.
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
    """Explain all rules, one sentence per key of the site file.

    Args:
        rules: the rules that apply at the site.
        has_file: whether the site has a site file. If not, keys that need the file are left out,
            and the last sentence says that no audit log is written.
    """
    values: Mapping[str, Any] = as_mapping(rules)
    sentences = []
    for key in SENTENCES:
        if has_file or key not in _OF_A_FILE:
            sentences.append(describe_rule(key, values[key]))
    if not has_file:
        sentences.append("without a site file there is no audit log")
    return sentences


def describe_rule(key: str, value: Any) -> str:
    """Describe one rule of a site file in a sentence.

    The sentence is the one for ``key`` in ``SENTENCES``, with ``value`` inserted. For some keys,
    ``SENTENCES`` has a separate sentence for values such as 0 or an empty list. A list is shown
    as names joined by commas, or as "*" if it contains "*". Limits in megabytes are shown in
    gigabytes.
    """
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
            "only the fedsilo that is installed here answers a run, if the run has the same one"
        ),
        _ELSE: "a run may bring its own code, and that code may ignore all rules below",
    },
    "trust": {**MEANINGS, _ELSE: "the site takes part in no run, because it has no level of trust"},
    "methods": {
        "": "a run may ask for no method",
        "*": "a run may ask for any method",
        _ELSE: "a run may only ask for these methods: {}",
    },
    "datasets": {
        "": "a run may ask for no data set",
        "*": "a run may ask for any data set",
        _ELSE: "a run may only ask for these data sets: {}",
    },
    "max-rounds": {
        0: "a run may have any number of rounds, within its limit of messages",
        _ELSE: "a run may have at most {} rounds",
    },
    "allow-folds": {
        True: "a run may choose which samples are for training, validation and testing",
        _ELSE: "a run may not choose which samples are for training, validation and testing",
    },
    "allow-embeddings": {
        True: "a run may ask for embeddings or attention maps of single images",
        _ELSE: "a run may not ask for embeddings or attention maps of single images",
    },
    "allow-folder-names": {
        True: "a run may use the names of image folders as classes, and receives these names",
        _ELSE: "a run may not use the names of image folders as classes",
    },
    "secure-aggregation": {
        "required": (
            "weights must leave masked, so the server learns only their sum over several sites"
        ),
        _ELSE: "weights may leave without a mask",
    },
    "max-epsilon": {
        0: "there is no cap on epsilon over all runs",
        _ELSE: "all runs together may spend at most epsilon {:g} per patient",
    },
    "delta": "epsilon is computed at delta {:g}",
    "counts-noise": {
        0: "with a cap on epsilon, sample counts have noise that costs a quarter of the cap",
        _ELSE: "with a cap on epsilon, sample counts have noise with an SD of {:g} patients",
    },
    "minimum-clip-norm": "a private run must use a clipping norm per patient of at least {:g}",
    "maximum-clip-norm": "a private run must use a clipping norm per patient of at most {:g}",
    "minimum-noise": "a private run must add noise of at least {:g} times that norm",
    "maximum-noise": "a private run must add noise of at most {:g} times that norm",
    "minimum-train-samples": {
        0: "the site takes part with any number of training samples",
        _ELSE: "the site takes part only with at least {} training samples",
    },
    "minimum-per-label": {
        0: "the site takes part with any number of training samples of a label",
        _ELSE: "the site takes part only with at least {} training samples of each of its labels",
    },
    "minimum-batch": "each optimiser step needs at least {} samples",
    "minimum-steps-per-reply": "what was trained leaves only after at least {} optimiser steps",
    "minimum-measured": "measurements leave only for splits of at least {} samples",
    "sums-min-count": "sums, means and counts leave only for at least {} samples",
    "colluding-sites": "a secure sum must hide the site from the server plus {} other sites",
    "secure-samples": "in a secure sum the site counts as one of at most {} samples",
    "clip-norm": "a run made for trust 'sums' must clip updates to the norm {:g}",
    "records": {
        "": "nothing leaves except refusals",
        "*": "all records that a method sends may leave, within the rules below",
        _ELSE: "of the records that a method sends, only these may leave: {}",
    },
    "refused-records": {
        "": "no record is withheld by its name",
        _ELSE: "these records never leave: {}",
    },
    "max-messages": "a run may send at most {} messages",
    "max-repeats": "a run may ask for each phase of a round at most {} times",
    "max-runs-per-day": "at most {} new runs may begin in 24 hours",
    "max-seconds": "a run may take at most {:g} seconds of work",
    "max-memory": {
        0: "a message may use nine tenths of the machine's memory",
        _ELSE: "a message may use at most {:g} GB of memory",
    },
    "max-state": "private states of runs may use {:g} GB here; the oldest are deleted first",
    "max-cache": "decoded data may use {:g} GB here; the oldest are deleted first",
    "audit-log": {
        "": "each message is written to the audit log in the 'state-dir' before its reply leaves",
        _ELSE: "each message is written to {} before its reply leaves",
    },
}
