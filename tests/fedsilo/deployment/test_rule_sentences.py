"""The site file in sentences: each key has one, and it changes with the key."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedsilo.client_app.site.policy import SiteFile, parse_site_file
from fedsilo.core.errors import RefusedError
from fedsilo.core.settings_schema import Value, key_of
from fedsilo.deployment.rules import SENTENCES, describe_rule, effective_rules, explain_rules
from tests.support.errors import refuses

OTHER: dict[type, Any] = {bool: True, str: "north", float: 0.25, int: 77}
# Lists have no type to choose by, a choice has no free text
CHOSEN: dict[str, Any] = {
    "app": "any",
    "trust": "nobody",
    "secure_aggregation": "required",
    "methods": ("local",),
    "datasets": ("table",),
    "records": ("config/*",),
    "refused_records": ("arrays/maps/*",),
}
FIELDS = [field.name for field in dataclasses.fields(SiteFile) if field.name != "given"]


def test_every_key_of_the_site_file_has_its_sentence() -> None:
    assert sorted(SENTENCES) == sorted(map(key_of, FIELDS))


@pytest.mark.parametrize("name", FIELDS)
def test_a_key_changes_its_own_sentence_and_no_other(name: str) -> None:
    usual = SiteFile()
    value = CHOSEN.get(name, OTHER[type(getattr(usual, name))] if name not in CHOSEN else None)
    changed = dataclasses.replace(usual, **{name: value})
    before, after = explain_rules(usual), explain_rules(changed)
    told = zip(SENTENCES, before, after, strict=True)
    assert [key for key, old, new in told if old != new] == [key_of(name)]
    assert not any("\n" in sentence or "{" in sentence for sentence in after)


def test_a_value_of_braces_is_said_as_it_is() -> None:
    assert describe_rule("site", "{0.__class__}") == "the file is for site {0.__class__}"
    assert describe_rule("methods", ("fed*", "*")) == "a run may ask for any method"


def _context(**node: Value) -> Context:
    return Context(0, 0, {key.replace("_", "-"): v for key, v in node.items()}, RecordDict(), {})


def test_of_file_and_node_config_the_stricter_is_explained(tmp_path: Path) -> None:
    text = 'methods: [fedavg]\ndatasets: ["*"]\nrecords: ["*"]\nmax-messages: 50\n'
    text += "minimum-measured: 30\n"
    (tmp_path / "site.yaml").write_text(text)
    rules = effective_rules(
        _context(
            site="north",
            site_file=str(tmp_path / "site.yaml"),
            max_messages=30,
            minimum_measured=25,
        )
    )
    assert (rules.max_messages, rules.minimum_measured, rules.minimum_batch) == (30, 30, 8)
    told = explain_rules(rules)
    assert "a run may only ask for these methods: fedavg" in told
    assert "a run may send at most 30 messages" in told
    assert "a run may ask for any data set" in told
    assert len(told) == len(SENTENCES)


def test_without_a_site_file_all_may_be_asked_that_needs_no_consent() -> None:
    told = explain_rules(effective_rules(_context(site="north", allow_folds=True)), has_file=False)
    assert "a run may ask for any method" in told
    assert "a run may choose which samples are for training, validation and testing" in told
    assert "a run may not ask for embeddings or attention maps of single images" in told
    assert told[-1] == "without a site file there is no audit log"


def test_a_site_that_trusts_nobody_needs_a_cap_wherever_it_is_named(tmp_path: Path) -> None:
    text = 'methods: ["*"]\ndatasets: ["*"]\nrecords: ["*"]\ntrust: nobody\n'
    (tmp_path / "site.yaml").write_text(text)
    node = {"site": "north", "site_file": str(tmp_path / "site.yaml")}
    with refuses(RefusedError, "max-epsilon", "delta"):
        effective_rules(_context(**node))
    assert effective_rules(_context(**node, max_epsilon=3.0)).max_epsilon == 3


def test_the_example_is_explained() -> None:
    example = Path(__file__).parents[3] / "docs" / "examples" / "site.yaml"
    told = "\n".join(explain_rules(parse_site_file(example.read_text())))
    assert "a run may only ask for these methods: fedavg, fedproto, local" in told
    assert "all runs together may spend at most epsilon 20" in told
    assert "these records never leave: config/sums-*, arrays/embeddings, arrays/maps/*" in told
    assert "a message may use at most 16 GB of memory" in told
