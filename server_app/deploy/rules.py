"""A hospital's rules, its ``site.yaml``: written at the hospital, from what is installed there.

Nothing of them comes from a kit, because whoever made or carried the kit would decide what this
hospital allows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsilo.client_app.site.policy import SiteFile
from fedsilo.client_app.site.site_file import read_rules
from fedsilo.client_app.site.trust import MEANINGS
from fedsilo.datasets.io.yaml_text import YamlError, parse_yaml, with_numbers
from fedsilo.models.contract.errors import FedsiloError, SettingError

SITE = "site.yaml"
_ALL = ("*",)
_HEAD = """\
# What this hospital allows. docs/site-file.md explains each key, docs/examples/site.yaml has all.
# In lists ["*"] is everything, [] nothing. Edit it at any time: it is read for each message.
"""


class RulesError(FedsiloError):
    """A hospital's rules cannot be used, or contradict the options of its start.

    Fix: correct the site file that the message names, or the options of ``fedsilo hospital
    start``.
    """

    code = "rules"


@dataclass(frozen=True)
class RuleOptions:
    """What the options of ``hospital start`` say of the hospital's rules."""

    trust: str = ""  # whom the hospital trusts, or empty if the option is not given
    methods: Sequence[str] = ()  # names or patterns, or empty for all
    datasets: Sequence[str] = ()  # names or patterns, or empty for all
    more: Sequence[str] = ()  # other keys of a site file, as key=value in YAML

    def values(self) -> dict[str, Any]:
        """Return the given values by key.

        Raises:
            SettingError: one has no '=', a key is given twice, or a value is no YAML.
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
            if not equals or not key:
                raise SettingError(f"--rule is '{text}', but must be KEY=VALUE")
            if key in values or key == "site":
                raise SettingError(f"--rule {key} is said by another option or rule: leave one out")
            try:
                values[key] = with_numbers(parse_yaml(value))
            except YamlError as error:
                raise SettingError(f"--rule {key}: {error}") from None
        return values


def write_rules(site: str, options: RuleOptions) -> str:
    """Return the text of a new site file, which allows everything that ``options`` do not limit.

    Raises:
        RulesError: no trust level is given, or an option cannot be used.
    """
    rules: dict[str, Any] = {"site": site, "trust": ""}
    rules |= {key: list(_ALL) for key in ("methods", "datasets", "records")}
    try:
        rules |= options.values()
        if not rules["trust"]:
            raise _no_trust(site)
        text = _HEAD + "".join(f"{key}: {json.dumps(value)}\n" for key, value in rules.items())
        read_rules(text, SiteFile)
        same = with_numbers(parse_yaml(text)) == rules
    except (SettingError, YamlError) as error:
        raise RulesError(f"{site}: these rules cannot be used: {error}") from None
    if not same:
        raise RulesError(f"{site}: a value of --rule reads otherwise in {SITE}: write the file")
    return text


def check_rules(
    text: str, site: str, options: RuleOptions, trusted_elsewhere: bool = False
) -> SiteFile:
    """Return what the hospital's own site file says, which no option may contradict.

    Args:
        text: of the file.
        site: the hospital's name.
        options: of the command. A service manager may give the same ones at each start.
        trusted_elsewhere: whether the node config says whom the hospital trusts.

    Raises:
        RulesError: the file cannot be used, is another site's, says not whom the hospital trusts,
            or an option says something else.
    """
    try:
        content = with_numbers(parse_yaml(text))
        rules: SiteFile = read_rules(text, SiteFile)
        given = options.values()
    except (SettingError, YamlError) as error:
        raise RulesError(f"{site}: {SITE} cannot be used: {error}") from None
    if rules.site not in ("", site):
        raise RulesError(f"{site}: {SITE} is for '{rules.site}', not for {site}")
    for key, value in given.items():
        if content.get(key) != value:
            raise RulesError(
                f"{site}: {SITE} has {_shown(content, key)}, but the option says "
                f"{json.dumps(value)}: edit the file, or leave the option out"
            )
    if not rules.trust and not trusted_elsewhere:
        raise _no_trust(site)
    return rules


def _no_trust(site: str) -> RulesError:
    return RulesError(
        f"nothing says whom {site} trusts: give --trust {', '.join(MEANINGS)}, or a line 'trust' "
        f"in {SITE}"
    )


def _shown(content: Mapping[str, Any], key: str) -> str:
    if key not in content:
        return f"no '{key}'"
    return f"'{key}' {json.dumps(content[key], default=str)}"
