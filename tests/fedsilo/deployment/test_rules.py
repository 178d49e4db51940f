"""A hospital's rules come from its options and its installed fedsilo, and from nowhere else."""

import json

import pytest

from fedsilo.core.errors import SettingError
from fedsilo.deployment.rules import RuleOptions, RulesError, check_rules, write_rules


def test_new_rules_say_what_the_options_say_and_allow_the_rest() -> None:
    options = RuleOptions(
        "nobody", ["fedavg", "local"], ["table"], ["max-epsilon=3.0", "delta=1e-6"]
    )
    text = write_rules("north", options)
    rules = check_rules(text, "north", options)
    assert (rules.site, rules.trust, rules.app) == ("north", "nobody", "installed")
    assert (rules.methods, rules.datasets, rules.records) == (
        ("fedavg", "local"),
        ("table",),
        ("*",),
    )
    assert (rules.max_epsilon, rules.delta) == (3.0, 1e-6)


def test_an_option_with_yaml_in_it_stays_one_text() -> None:
    text = write_rules("north", RuleOptions("sums", methods=['"]\ntrust: server\nx: ["']))
    assert check_rules(text, "north", RuleOptions("sums")).trust == "sums"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            RuleOptions(),
            "north has no level of trust: give --trust with one of server, sums, nobody",
        ),
        (RuleOptions("friends"), "these rules cannot be used: 'trust' must be one of"),
        (RuleOptions("sums", methods=["fedavgg"]), "unknown method 'fedavgg'"),
        (RuleOptions("sums", more=["max-rounds"]), "must be KEY=VALUE"),
        (RuleOptions("sums", more=["max-round=3"]), "did you mean 'max-rounds'"),
        (RuleOptions("sums", more=["trust=server"]), "set by another option"),
        (RuleOptions("sums", more=["site=south"]), "set by another option"),
        (RuleOptions("sums", more=["max-rounds=3\ntrust: server"]), "--rule max-rounds"),
        (RuleOptions("sums", more=["max-rounds=[1"]), "--rule max-rounds"),
    ],
)
def test_options_that_cannot_be_used_write_nothing(options: RuleOptions, said: str) -> None:
    with pytest.raises(RulesError) as refused:
        write_rules("north", options)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("site: south\ntrust: sums\n", RuleOptions(), "is for 'south', not for north"),
        ("trust: friends\n", RuleOptions(), "cannot be used"),
        ("trust: sums\ntrust: server\n", RuleOptions(), "cannot be used"),
        ('trust: sums\n"trust": server\n', RuleOptions(), "cannot be used"),
        ('"trust": server\n', RuleOptions("sums"), "has 'trust' \"server\", but the option says"),
        ("? trust\n: server\n", RuleOptions("sums"), "but the option says"),
        ("trust: &a server\naudit-log: /*a\n", RuleOptions("nobody"), "but the option says"),
        ("", RuleOptions(), "north has no level of trust"),
        ("trust: sums\n", RuleOptions(more=["max-rounds=3"]), "has no 'max-rounds'"),
        ("trust: sums\n", RuleOptions(methods=["fedavg"]), "has 'methods' [\"*\"]"),
    ],
)
def test_a_file_that_cannot_be_used_or_says_otherwise_is_refused(
    text: str, options: RuleOptions, said: str
) -> None:
    lists = "".join(f"{key}: {json.dumps(['*'])}\n" for key in ("methods", "datasets", "records"))
    with pytest.raises(RulesError) as refused:
        check_rules(text + lists, "north", options)
    assert said in str(refused.value)


def test_whom_a_site_trusts_may_be_said_in_the_node_config() -> None:
    lists = "methods: []\ndatasets: []\nrecords: []\n"
    assert check_rules(lists, "north", RuleOptions(), trusted_elsewhere=True).trust == ""
    with pytest.raises(SettingError, match="KEY=VALUE"):
        RuleOptions(more=["x"]).values()
