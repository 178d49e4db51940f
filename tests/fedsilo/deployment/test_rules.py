"""A hospital's rules come from its options and its installed fedsilo, and from nowhere else."""

import json

import pytest

from fedsilo.core.errors import SettingError
from fedsilo.deployment.options import RuleOptions
from fedsilo.deployment.rules import RulesError, check_rules, read_rules_given, write_rules


def test_new_rules_say_what_the_options_say_and_allow_the_rest() -> None:
    options = RuleOptions(
        trust="nobody",
        method=["fedavg", "local"],
        dataset=["table"],
        rule=["max-epsilon=3.0", "delta=1e-6"],
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
    text = write_rules("north", RuleOptions(trust="sums", method=['"]\ntrust: server\nx: ["']))
    assert check_rules(text, "north", RuleOptions(trust="sums")).trust == "sums"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            RuleOptions(),
            "north has no level of trust: give --trust with one of server, sums, nobody",
        ),
        (RuleOptions(trust="friends"), "these rules cannot be used: 'trust' must be one of"),
        (RuleOptions(trust="sums", method=["fedavgg"]), "unknown method 'fedavgg'"),
        (RuleOptions(trust="sums", rule=["max-rounds"]), "must be KEY=VALUE"),
        (RuleOptions(trust="sums", rule=["max-round=3"]), "did you mean 'max-rounds'"),
        (RuleOptions(trust="sums", rule=["trust=server"]), "set by another option"),
        (RuleOptions(trust="sums", rule=["site=south"]), "set by another option"),
        (RuleOptions(trust="sums", rule=["max-rounds=3\ntrust: server"]), "--rule max-rounds"),
        (RuleOptions(trust="sums", rule=["max-rounds=[1"]), "--rule max-rounds"),
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
        (
            '"trust": server\n',
            RuleOptions(trust="sums"),
            "has 'trust' \"server\", but the option says",
        ),
        ("? trust\n: server\n", RuleOptions(trust="sums"), "but the option says"),
        ("trust: &a server\naudit-log: /*a\n", RuleOptions(trust="nobody"), "but the option says"),
        ("", RuleOptions(), "north has no level of trust"),
        ("trust: sums\n", RuleOptions(rule=["max-rounds=3"]), "has no 'max-rounds'"),
        ("trust: sums\n", RuleOptions(method=["fedavg"]), "has 'methods' [\"*\"]"),
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
        read_rules_given(RuleOptions(rule=["x"]))
