"""A hospital's own rules for requests: a YAML file on its disk, named in its node config.

``site-file`` in the node config is its absolute path. The file is read for each message, and again
before the reply leaves. No run and no message can name it, and if the file is unusable, everything
is refused. A forbidden request is refused before data are opened if possible, and always before
anything leaves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flwr.app import Context, Message

from fedsilo.client_app.site.audit_log import check_log, group_names, names_in
from fedsilo.client_app.site.identity import own_name, prefix_refusals
from fedsilo.client_app.site.limits import Limits, cap, floor
from fedsilo.client_app.site.node import Answering, build_settings, own_folder
from fedsilo.client_app.site.trust import MEANINGS
from fedsilo.core.errors import RefusedError, SettingError
from fedsilo.core.files.atomic_files import read_regular
from fedsilo.core.messages import CONFIG, SURVEYED
from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, as_mapping, build, keys_with, setting

SITE_FILE = "site-file"
_SHOWN_GROUPS = 5  # groups of names in an error; further groups are counted


def _lower_cap(one: float, other: float) -> float:
    if one and other:
        return min(one, other)
    return max(one, other)  # 0 means no cap, so the only cap holds


def _less_trust(one: str, other: str) -> str:
    return max(one, other, key=("", *MEANINGS).index)


@dataclass(frozen=True)
class SiteFile(Limits):
    """A hospital's rules, with its minimums and quotas; docs/site-file.md explains each key.

    An entry of a list may contain ``*`` for any characters. ``given`` has the single values that
    the file names; the node config decides all other values.
    """

    site: str = setting("", "the site that the file is for: the node config's 'site'")
    trust: Literal["server", "sums", "nobody"] = setting(
        "", "whom the site trusts; without it the site takes no part", roles="trust"
    )
    methods: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    refused_records: tuple[str, ...] = ()
    max_rounds: int = setting(0, "maximum number of rounds of a run, or 0 for any number", ge=0)
    minimum_train_samples: int = floor(0, "fewest training samples", ge=0)
    minimum_per_label: int = floor(0, "fewest training samples of each label that occurs", ge=0)
    max_epsilon: float = cap(0.0, "cap over all runs, or 0 for none", ge=0.0)
    delta: float = setting(1e-5, "delta at which the cap holds", roles="least", gt=0.0, lt=1.0)
    allow_folds: bool = setting(False, "whether a run may choose among samples", roles="least")
    allow_embeddings: bool = setting(
        False, "whether embeddings of single images may leave", roles="least"
    )
    allow_folder_names: bool = setting(
        False, "whether data set 'folder' may send its folders' names as class names", roles="least"
    )
    app: Literal["installed", "any"] = setting(
        "installed",
        "whose code answers: the hospital's own, for runs of its version, or any run's",
    )
    secure_aggregation: Literal["any", "required"] = setting(
        "any", "whether unmasked weights may leave; required: only masked ones"
    )
    audit_log: str = setting("", "the audit log's file; by default it is in 'state-dir'")
    given: Mapping[str, Value] = field(default_factory=dict)

    def refuse_request(self, settings: CommonSettings, round_: int) -> None:
        """Check that the site file allows a run's method, data set, rounds and secure aggregation.

        Args:
            settings: the run's settings.
            round_: the round that the message asks for. It is checked too, because a message may
                ask for a later round than the settings allow.

        Raises:
            RefusedError: a rule forbids the request. The error gives the rule's key and value, and
                the requested value.
        """
        reason = next(self._reasons_against_request(settings, round_), "")
        if reason:
            raise RefusedError(reason)

    def _reasons_against_request(self, settings: CommonSettings, round_: int) -> Iterator[str]:
        """Yield a sentence for each rule of the site file that a request breaks, in a fixed order.

        - 'methods' and 'datasets' must have patterns that match the run's method and data set.
        - Neither the run's rounds nor ``round_`` may exceed 'max-rounds', unless that is 0.
        - If 'secure-aggregation' is "required", the run must use it.

        The caller tells the server only the first sentence.
        """
        for what, key, name, allowed in (
            ("method", "methods", settings.method, self.methods),
            ("data set", "datasets", settings.dataset, self.datasets),
        ):
            if not matches(name, allowed):
                listed = ", ".join(allowed) or "none"
                yield f"the site file does not allow {what} '{name}' ('{key}': {listed})"
        if self.max_rounds and max(settings.rounds, round_) > self.max_rounds:
            most = format_count(self.max_rounds, "round")
            yield (
                f"the site file allows runs of at most {most} ('max-rounds'), but "
                f"{max(settings.rounds, round_)} are asked for"
            )
        if self.secure_aggregation == "required" and settings.secure_aggregation == "none":
            yield (
                "the site file demands secure aggregation ('secure-aggregation': required), but "
                "the run has none: set its 'secure.aggregation' to 'secagg'"
            )

    def refuse_names(self, names: Sequence[str]) -> None:
        """Check that all names in a reply, ``<record>/<key>``, may leave the site.

        Each name must match a pattern in 'records' and no pattern in 'refused-records'.

        Raises:
            RefusedError: a name may not leave. Names that fail at 'records' are reported first. The
                error lists up to 5 groups, such as "arrays/head.*", and the number of further
                groups.
        """
        unlisted = [name for name in names if not matches(name, self.records)]
        barred = [name for name in names if matches(name, self.refused_records)]
        for key, refused in (("records", unlisted), ("refused-records", barred)):
            if refused:
                groups = list(group_names(refused))
                shown = ", ".join(groups[:_SHOWN_GROUPS])
                if len(groups) > _SHOWN_GROUPS:
                    shown += f" and {len(groups) - _SHOWN_GROUPS} more"
                raise RefusedError(
                    f"the site file does not let {shown} leave ('{key}'), which the method sends: "
                    "nothing left the site"
                )

    def survey_parts(self, parts: Iterable[str]) -> set[str]:
        """Return the subset of ``parts`` that may leave in the answer to a survey.

        In a survey, a site describes its data. A part may leave if "survey/<part>" matches a
        pattern in 'records' and no pattern in 'refused-records'. The pattern in 'records' must
        begin with "survey/", so "*" is not enough.
        """
        listed = [pattern for pattern in self.records if pattern.startswith(f"{SURVEYED}/")]
        allowed = set()
        for part in parts:
            name = f"{SURVEYED}/{part}"
            if matches(name, listed) and not matches(name, self.refused_records):
                allowed.add(part)
        return allowed

    def restrict(self, context: Context) -> Context:
        """Return a copy of the context whose node config also has the site file's limits.

        If the node config and the site file have the same key, the stricter value wins, such as the
        higher minimum or the lower quota. If either of them has a cap on epsilon but no delta, its
        delta is the default, 1e-5.

        Raises:
            SettingError: a limit in the node config has the wrong type or is out of range.
        """
        # Checked and typed first, so that only values of the same type are compared
        known = {key: value for key, value in context.node_config.items() if key in _STRICTER}
        typed = as_mapping(build(SiteFile, known))
        in_node_config = _with_delta({key: typed[key] for key in known})
        merged = {**context.node_config, **in_node_config}
        for key, value in _with_delta(self.given).items():
            if key not in _STRICTER:
                continue
            # Neither side may loosen the other's rule
            if key in in_node_config:
                value = _STRICTER[key](in_node_config[key], value)
            merged[key] = value
        return replace(context, node_config=merged)


# If file and node config both have a key, the stricter value wins, by the role of its field
_BY_ROLE: Mapping[str, Callable[[Any, Any], Any]] = {
    "floor": max,
    "quota": min,
    "most": min,
    "cap": _lower_cap,
    "least": min,  # False is below True, so a consent needs both sides
    "trust": _less_trust,
}
_STRICTER: dict[str, Callable[[Any, Any], Any]] = {}
for _role, _stricter in _BY_ROLE.items():
    _STRICTER.update(dict.fromkeys(keys_with(SiteFile, _role), _stricter))
NODE_LIMITS = tuple(_STRICTER)  # keys of a site file that the node config may also have


def read_site_file(context: Context) -> SiteFile:
    """Read and check the site file, the hospital's own rules for requests.

    The node config's 'site-file' must be set. It is the file's path, and symbolic links are
    followed. A site file without 'site' is valid for every site.

    Raises:
        RefusedError: the path is not absolute, the file cannot be read or has an error, or its
            'site' is not this site's name. The error does not name the path.
    """
    path = Path(str(context.node_config[SITE_FILE]))
    if not path.is_absolute():
        raise RefusedError("'site-file' in the node config must be an absolute path")
    fault, site_file = "", SiteFile()
    try:
        text = read_regular(Path(os.path.realpath(path))).decode("utf-8")
        site_file = parse_site_file(text)
    except OSError as error:
        fault = f"the site file cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        fault = "the site file cannot be read: it is not UTF-8 text"
    except SettingError as error:
        fault = f"the site file cannot be used: {error}"
    if site_file.site and site_file.site != own_name(context):
        other = " ".join(site_file.site.split())
        fault = f"the site file's 'site' is '{other}', but this is site '{own_name(context)}'"
    if fault:
        raise RefusedError(fault)
    return site_file


@contextmanager
def enforce_site_file(answering: Answering) -> Iterator[None]:
    """Check a message against the site file, run the block that answers it, and check the reply.

    The site file has the hospital's own rules for requests. It is read before and after the block,
    because the hospital may change it meanwhile. Both versions must allow the request and all names
    in the reply. If a limit became stricter, the reply is refused, but quotas may change. During
    the block, ``answering.context`` has the file's limits in its node config.

    Raises:
        RefusedError: the site file forbids the request or the reply, became stricter, or is
            unusable. The error also means that the audit log cannot be written.
        SettingError: a setting of the run has the wrong type or is not allowed.
    """
    message, context = answering.message, answering.context
    settings = build_settings(CommonSettings, context.run_config)
    with prefix_refusals(own_name(context)):
        rules = answering.rules = read_site_file(context)
        rules.refuse_request(settings, _round_of(message))
        check_log(log_path(context, rules))  # now, and not after an hour of training
        answering.context = limited = rules.restrict(context)
    yield
    answering.rules = None  # if the file is unusable now, the log is in the 'state-dir'
    with prefix_refusals(own_name(context)):
        newest = answering.rules = read_site_file(context)
        newest.refuse_request(settings, _round_of(message))
        _refuse_tightened(limited.node_config, newest.restrict(context).node_config)
        for file in (rules, newest):
            file.refuse_names(names_in(answering.content))


def _refuse_tightened(before: Mapping[str, Value], now: Mapping[str, Value]) -> None:
    """Check that no limit became stricter while the message was answered.

    Quotas, such as 'max-messages', are not checked.

    Args:
        before: the node config with the limits that applied while the message was answered; a
            missing limit counts as its default.
        now: the node config with the limits of the site file after the answer. A limit that is
            missing there is not checked.

    Raises:
        RefusedError: a limit is stricter now. The error names its key.
    """
    usual, quotas = as_mapping(SiteFile()), keys_with(SiteFile, "quota")
    for key, stricter in _STRICTER.items():
        if key not in now or key in quotas:
            continue
        earlier = before.get(key, usual[key])
        if stricter(earlier, now[key]) != earlier:
            raise RefusedError(
                f"the site file's '{key}' was tightened while the message was answered: nothing "
                "left the site; ask again"
            )


def _round_of(message: Message) -> int:
    try:
        return int(str(message.content[CONFIG]["round"]))  # parsed like an Instruction does
    except (KeyError, ValueError):
        return 0  # parsing the round fails later with a proper error


def log_path(context: Context, rules: SiteFile | None) -> Path:
    """Return the path of the site's audit log; create its folder if the path is the default.

    The path is the site file's 'audit-log', with symbolic links resolved. By default it is
    ``audit.jsonl`` in the hospital's folder in the 'state-dir'. If that folder cannot be created,
    no error is raised here, but opening the log will fail.

    Args:
        context: the node's context.
        rules: the site file; None if there is none or it is unusable, which means the default path.

    Raises:
        RefusedError: the site file has no 'audit-log', and the node config has no 'state-dir'.
    """
    if rules is not None and rules.audit_log:
        return Path(os.path.realpath(rules.audit_log))  # the hospital may name a symbolic link
    home = own_folder(context, own_name(context))
    if home is not None:
        with suppress(OSError):  # opening the log later raises a proper error
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
        return home / "audit.jsonl"
    raise RefusedError(
        "there is no audit log: name an 'audit-log' in the site file or a 'state-dir' in the node "
        "config"
    )


def refuse_few_samples(site: str, counts: Sequence[int], node_config: Mapping[str, Value]) -> None:
    """Check that a site has enough training samples, in total and for each label that it has.

    Args:
        site: the site's name.
        counts: the reported number of training samples of each label; a label with 0 is ignored.
        node_config: the node's config with the site file's limits 'minimum-train-samples' and
            'minimum-per-label'. A missing limit gets its default.

    Raises:
        RefusedError: the total or a label's count is too low. The error names the limit, but not
            the count, which must not leave the site.
        SettingError: one of the two limits has the wrong type or is out of range.
    """
    keys = ("minimum-train-samples", "minimum-per-label")
    # Only these two: another wrong value of the node config has its own error elsewhere
    limits = build(SiteFile, {key: node_config[key] for key in keys if key in node_config})
    lacking = ""
    if sum(counts) < limits.minimum_train_samples:
        lacking = (
            f"fewer than {limits.minimum_train_samples} training samples ('minimum-train-samples')"
        )
    elif any(0 < count < limits.minimum_per_label for count in counts):
        lacking = (
            f"a label of fewer than {limits.minimum_per_label} training samples "
            "('minimum-per-label')"
        )
    if lacking:
        raise RefusedError(f"site {site} has {lacking}: it takes no part")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether the whole ``name`` matches a pattern, in which ``*`` stands for any string.

    That string may be empty and may contain "/". Upper and lower case count as different. Without
    patterns the result is False.
    """
    for pattern in patterns:
        expression = re.escape(pattern).replace(r"\*", ".*")
        if re.fullmatch(expression, name, re.DOTALL):
            return True
    return False


def parse_site_file(text: str) -> SiteFile:
    """Parse the YAML text of a site file, the hospital's own rules for requests.

    The lists 'methods', 'datasets' and 'records' are required, but may be empty. All values are
    checked.

    Raises:
        SettingError: the text is not valid YAML, a key is unknown or missing, or a value is
            invalid.
    """
    # Imported lazily: needed only with a site file
    from fedsilo.client_app.site.site_file import read_rules

    rules: SiteFile = read_rules(text, SiteFile)
    return rules


def _with_delta(values: Mapping[str, Value]) -> dict[str, Value]:
    """Add the default delta to values that have a cap on epsilon but no delta."""
    if "max-epsilon" in values:
        return {"delta": SiteFile.delta, **values}
    return dict(values)
