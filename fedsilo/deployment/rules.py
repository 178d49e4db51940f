"""A hospital's rules, the file ``site.yaml``, written at the hospital by its own installation.

No rule comes from a kit, because then whoever made or carried the kit would decide what this
hospital allows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsilo.client_app.site.policy import SiteFile
from fedsilo.client_app.site.site_file import read_rules
from fedsilo.client_app.site.trust import MEANINGS
from fedsilo.core.errors import FedsiloError, SettingError
from fedsilo.core.files.yaml_text import YamlError, parse_yaml, with_numbers
from fedsilo.core.one_line import one_line

SITE = "site.yaml"
_ALL = ("*",)
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


@dataclass(frozen=True)
class RuleOptions:
    """The options of ``hospital start`` from which the hospital's rules are made."""

    trust: str = ""  # level of trust: server, sums or nobody; empty if the option is not given
    methods: Sequence[str] = ()  # names or patterns, or empty for all
    datasets: Sequence[str] = ()  # names or patterns, or empty for all
    more: Sequence[str] = ()  # other keys of a site file, as key=value in YAML

    def values(self) -> dict[str, Any]:
        """Return the rules that the options state, by key of the site file.

        Raises:
            SettingError: a rule has no '=', a key is given twice, or a value is no YAML.
        """
        values: dict[str, Any] = {}
        if self.trust:
            values["trust"] = self.trust
        if self.methods:
            values["methods"] = list(self.methods)
        if self.datasets:
            values["datasets"] = list(self.datasets)
        for text in self.more:
            key, equals, value = text.partition("=")
            key = key.strip()
            fault = ""
            if not equals or not key:
                fault = f"--rule is '{one_line(text)}', but must be KEY=VALUE"
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
    """Build the text of a new site file, which allows everything that ``options`` do not limit.

    Raises:
        RulesError: no trust level is given, or an option cannot be used.
    """
    rules: dict[str, Any] = {"site": site, "trust": ""}
    for key in ("methods", "datasets", "records"):
        rules[key] = list(_ALL)
    text = fault = ""
    try:
        rules |= options.values()
        text = _HEAD
        for key, value in rules.items():
            text += f"{key}: {json.dumps(value)}\n"
        if not rules["trust"]:
            fault = _no_trust(site)
        # The hospital is bound by what the file says once it is read again, not by what was meant
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

    Args:
        text: the file's text.
        site: the hospital's name.
        options: the command's options. A service manager may give the same options at each start.
        trusted_elsewhere: whether the node config has the level of trust.

    Raises:
        RulesError: the file cannot be used, belongs to another site, has no level of trust, or an
            option contradicts it.
    """
    try:
        content = with_numbers(parse_yaml(text))
        rules: SiteFile = read_rules(text, SiteFile)
        given = options.values()
    except (SettingError, YamlError) as error:
        raise RulesError(f"{site}: {SITE} cannot be used: {error}") from None
    fault = ""
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
