import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import ConfigRecord, Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.client_app import opening
from fedsilo.client_app.app import app
from fedsilo.client_app.lab import Lab, Outgoing
from fedsilo.client_app.methods.fedavg import FedAvgSite
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.site import policy
from fedsilo.client_app.site.audit_log import group_names, names_in
from fedsilo.client_app.site.policy import SiteFile, log_path, matches, read_site_file
from fedsilo.core.errors import RefusedError, SiteError
from fedsilo.core.messages import ARRAYS, CONFIG, EVALUATE, HELLO, METRICS, SURVEY, TRAIN
from fedsilo.core.methods import METHODS, settings_class, site_class
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import key_of
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import exchanged_arrays
from fedsilo.models.privacy.accountant import epsilon
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.wire.records import record_bytes, unbundle
from tests.support.lab import session_with
from tests.support.setting_keys import as_keys
from tests.support.tiny import TINY

Node = Callable[..., Context]
Make = Callable[..., Message]

# What is here of tiny silos is not about floors, which tests/client_app/site/test_limits.py holds
LOW: dict[str, Any] = {
    **dict.fromkeys(("minimum-batch", "minimum-measured", "sums-min-count"), 1),
}
EVERYTHING: dict[str, Any] = {"methods": ["*"], "datasets": ["*"], "records": ["*"]} | LOW
EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "site.yaml"


@pytest.fixture
def hospital(tmp_path: Path, context: Node) -> Callable[..., Context]:
    """Return a builder of a hospital's Context: keys of its site file, node config, run config."""

    def make(
        rules: dict[str, Any] | str | None = None,
        node: dict[str, Any] | None = None,
        method: str = "fedavg",
        **changes: Any,
    ) -> Context:
        path = tmp_path / "site.yaml"
        text = rules if isinstance(rules, str) else yaml.safe_dump(EVERYTHING | (rules or {}))
        path.write_text(text)
        own = {"site": "s1a", "state-dir": str(tmp_path), "trust": "server", "site-file": str(path)}
        return context(own | (node or {}), method, **changes)

    return make


Hospital = Callable[..., Context]
PRIVATE: dict[str, Any] = {"sample_clip_norm": 1.0, "noise_multiplier": 6.0}


def table_hospital(hospital: Hospital, rules: dict[str, Any], **changes: Any) -> Context:
    """Return the context of a made-up heart hospital, of 30 training rows."""
    found = hospital(rules, {"site": "switzerland"})
    values = {"method": "fedavg", "dataset": "heart-synthetic"}
    named = as_keys(changes)
    found.run_config.update(resolve(values | named).as_mapping())
    return found


def log_of(context: Context) -> list[dict[str, Any]]:
    rules = None
    with contextlib.suppress(RefusedError):
        rules = read_site_file(context)
    return [json.loads(line) for line in log_path(context, rules).read_text().splitlines()]


def hello() -> Message:
    return Message(RecordDict({CONFIG: ConfigRecord({"hello": True})}), 1001, HELLO)


def reason_of(reply: Message) -> str:
    assert reply.has_error()
    assert not reply.has_content()
    assert "\n" not in str(reply.error.reason)
    return str(reply.error.reason)


def refusal(context: Context, asked: Message | None = None) -> str:
    """Return the reason of a refusal, of which nothing but the reason left and the log knows."""
    asked = asked or hello()
    reason = reason_of(app(asked, context))
    last = log_of(context)[-1]
    assert (last["outcome"], last["records"], last["kind"]) == (
        *("refused", {}),
        asked.metadata.message_type,
    )
    assert last["why"] == reason
    assert last["bytes-out"] == len(reason.encode())
    return reason


@pytest.fixture
def private_weights(resolved: Callable[..., RunSettings], silo: Silo) -> dict[str, Any]:
    """Return the initial weights of a network with group norms."""
    network = build_classifier(resolved(**PRIVATE).common, silo.shape)
    return {name: tensor.numpy() for name, tensor in exchanged_arrays(network).items()}


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no data be opened."""

    def fail(*_: Any) -> None:
        raise AssertionError("data were opened")

    monkeypatch.setattr("fedsilo.client_app.opening.load_silo", fail)


def test_the_site_file_is_read_before_the_answer_and_once_more_before_it_leaves(
    hospital: Hospital,
    message: Make,
    weights: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[str] = []
    usual, answering = policy.parse_site_file, FedAvgSite.train

    def parsed(text: str) -> SiteFile:
        reads.append("read")
        return usual(text)

    def train(self: FedAvgSite, lab: Lab) -> Outgoing:
        reads.append("train")
        return answering(self, lab)

    monkeypatch.setattr(policy, "parse_site_file", parsed)
    monkeypatch.setattr(FedAvgSite, "train", train)
    assert app(message(TRAIN, weights), hospital()).has_content()
    assert reads == ["read", "train", "read"]


def test_a_site_that_names_no_file_answers_as_before_and_keeps_no_log(
    context: Node, tmp_path: Path
) -> None:
    assert app(
        hello(), context({"site": "s1a", "state-dir": str(tmp_path), "trust": "server"})
    ).has_content()
    assert not list(tmp_path.rglob("*audit*"))


@pytest.mark.parametrize(
    ("tightened", "said"),
    [
        ({"records": ["arrays/*"]}, "does not let config/backbone, config/"),
        ({"methods": ["local"]}, "does not allow method 'fedavg'"),
        ({"minimum-train-samples": 10**6}, "'minimum-train-samples' was tightened while the"),
        ({"max-epsilon": 0.1}, "'max-epsilon' was tightened while the message was answered"),
        ({"site": "s2a"}, "'site' is 's2a', but this is site 's1a'"),
        ("methods: [", "cannot be used"),
        ({"max-runs-per-day": 1}, ""),
    ],
)
def test_a_reply_is_judged_by_the_site_file_as_it_is_when_the_reply_leaves(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch, tightened: dict[str, Any] | str, said: str
) -> None:
    context, load = hospital(), opening.load_silo

    def tighten(*given: Any) -> Silo:
        hospital(tightened)  # writes the file while the message is answered
        return load(*given)

    monkeypatch.setattr(opening, "load_silo", tighten)
    if said:
        assert said in refusal(context)
    else:
        assert app(hello(), context).has_content()


def test_what_a_site_file_forbade_when_a_message_came_does_not_leave_by_a_laxer_one(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, load = hospital({"records": ["arrays/*"]}), opening.load_silo

    def loosen(*given: Any) -> Silo:
        hospital()
        return load(*given)

    monkeypatch.setattr(opening, "load_silo", loosen)
    assert "does not let config/backbone" in refusal(context)


def test_each_message_has_one_line_with_its_records_and_bytes(
    hospital: Hospital, message: Make, weights: dict[str, Any]
) -> None:
    node = hospital()
    asked = [hello(), message(TRAIN, weights), message(EVALUATE, weights, round=2)]
    replies = [unbundle(app(one, node).content) for one in asked]
    assert [sorted(reply) for reply in replies] == [[CONFIG], [ARRAYS, METRICS], [METRICS]]
    found = log_of(node)
    assert [line["kind"] for line in found] == [HELLO, TRAIN, EVALUATE]
    assert [line["round"] for line in found] == [0, 1, 2]
    for line, one, reply in zip(found, asked, replies, strict=True):
        assert (line["site"], line["outcome"], line["why"]) == ("s1a", "answered", "")
        assert line["bytes-in"] == record_bytes(one.content)
        assert line["bytes-out"] == record_bytes(reply)
        assert line["records"] == group_names(names_in(reply))
    head = sum(name.startswith("head.") for name in weights)
    sent = {"arrays/encoder.*": len(weights) - head, "arrays/head.*": head}
    assert {k: n for k, n in found[1]["records"].items() if k.startswith("arrays")} == sent
    assert log_path(node, read_site_file(node)).parts[-3:] == (".own", "s1a", "audit.jsonl")


def test_a_failure_is_logged_as_one_and_not_as_a_refusal(hospital: Hospital, message: Make) -> None:
    node = hospital()
    assert "has no phase 'dream'" in reason_of(app(message(TRAIN, phase="dream"), node))
    broken = message(TRAIN)
    del broken.content[CONFIG]
    assert reason_of(app(broken, node)).startswith("a message lacks 'round'")
    assert [line["outcome"] for line in log_of(node)] == ["failed", "failed"]


@pytest.mark.usefixtures("unopened")
@pytest.mark.parametrize(
    ("rules", "changes", "said"),
    [
        ({"methods": ["local"]}, {}, "does not allow method 'fedavg' ('methods': local)"),
        ({"methods": []}, {}, "does not allow method 'fedavg' ('methods': none)"),
        (
            {"datasets": ["heart", "mn*"]},
            {},
            "does not allow data set 'digits' ('datasets': heart, mn*)",
        ),
        ({"max-rounds": 1}, {}, "at most 1 round ('max-rounds'), but 2 are asked for"),
        (
            {"secure-aggregation": "required"},
            {},
            "('secure-aggregation': required), but the run has none: set",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [HELLO, TRAIN, EVALUATE])
def test_a_request_beyond_the_file_is_refused_before_data_are_opened(
    hospital: Hospital,
    message: Make,
    rules: dict[str, Any],
    changes: dict[str, Any],
    said: str,
    kind: str,
) -> None:
    node = hospital(rules, **changes)
    reason = refusal(node, hello() if kind == HELLO else message(kind))
    assert reason.startswith("site s1a: the site file ")
    assert said in reason


@pytest.mark.parametrize(
    ("rules", "changes"),
    [
        ({"methods": ["local", "fedavg"]}, {}),
        ({"datasets": ["digi*"]}, {}),
        ({"max-rounds": 2}, {}),
        ({"trust": "nobody", "max-epsilon": 9.0}, {"trust": "nobody", **PRIVATE}),
        ({"minimum-train-samples": 36}, {}),
        ({"minimum-per-label": 1}, {}),
        ({"site": "s1a"}, {}),
        (
            {"secure-aggregation": "required"},
            {"clip_norm": 1.0, "secure_aggregation": "secagg", "method": "fedavg"},
        ),
    ],
    ids=str,
)
def test_a_request_within_the_file_is_answered(
    hospital: Hospital, rules: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert app(hello(), hospital(rules, **changes)).has_content()


@pytest.mark.parametrize("round_", [3, "3", " 3 "])
def test_a_round_that_the_run_should_not_have_is_refused(
    hospital: Hospital, message: Make, round_: Any
) -> None:
    asked = message(TRAIN)
    asked.content.config_records[CONFIG]["round"] = round_
    assert "but 3 are asked for" in refusal(hospital({"max-rounds": 2}), asked)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"minimum-train-samples": 37}, "fewer than 37 training samples"),
        ({"minimum-per-label": 20}, "a label of fewer than 20 training samples"),
    ],
)
def test_a_silo_below_the_hospitals_counts_takes_no_part_and_its_count_stays_at_home(
    hospital: Hospital, message: Make, rules: dict[str, int], said: str
) -> None:
    node = hospital(rules)
    for asked in (hello(), message(TRAIN)):
        assert f"site s1a has {said} ('{next(iter(rules))}')" in (told := refusal(node, asked))
        assert "36" not in told


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            {"records": ["metrics/*", "config/*", "arrays/head.*"]},
            "does not let arrays/encoder.* leave ('records')",
        ),
        (
            {"refused-records": ["arrays/head.1.*", "metrics/*.loss"]},
            "does not let arrays/head.*, metrics/incoming.*, metrics/trained.* leave "
            "('refused-records')",
        ),
        ({"records": ["config/*"]}, "metrics/num-examples and 5 more leave ('records')"),
    ],
    ids=str,
)
def test_a_reply_with_a_record_that_may_not_leave_stays_whole_at_the_site(
    hospital: Hospital, message: Make, weights: dict[str, Any], rules: dict[str, Any], said: str
) -> None:
    node = hospital(rules)
    assert app(hello(), node).has_content()
    reason = refusal(node, message(TRAIN, weights))
    assert reason.startswith("site s1a: the site file does not let ")
    assert said in reason


def test_sums_of_a_table_stay_at_home_while_the_rest_of_the_hello_may_leave(
    hospital: Hospital,
) -> None:
    rules = {"refused-records": ["config/sums-*"]}
    reason = refusal(table_hospital(hospital, rules))
    assert "config/sums-count, config/sums-squares, config/sums-total leave" in reason
    assert app(hello(), table_hospital(hospital, rules, standardise="site")).has_content()


@given(st.text("ab./\n*", max_size=6), st.text("ab./\n", max_size=6), st.text("ab./\n", max_size=6))
def test_a_star_is_any_characters_and_nothing_else_means_anything(
    name: str, head: str, tail: str
) -> None:
    whole = len(name) >= len(head) + len(tail)
    fits = whole and name.startswith(head) and name.endswith(tail)
    assert matches(name, [f"{head}*{tail}"]) == fits
    assert matches(name, [head]) == (name == head)
    assert matches(name, ["*"])
    assert not matches(name, [])


@pytest.mark.parametrize(
    ("rules", "node", "floor"),
    [(20, None, 20), (3, None, 10), (20, 30, 30), (30, 20, 30), (None, 15, 15)],
)
def test_the_floor_of_sums_is_the_highest_of_file_node_and_run(
    hospital: Hospital, rules: int | None, node: int | None, floor: int
) -> None:
    own = {} if node is None else {"sums-min-count": node}
    context = hospital({} if rules is None else {"sums-min-count": rules}, own)
    assert app(hello(), context).content[CONFIG]["floor"] == floor


def test_a_raised_floor_keeps_the_sums_of_a_table_at_home(hospital: Hospital) -> None:
    reason = refusal(table_hospital(hospital, {"sums-min-count": 31}))
    assert "it has 30 training rows, but at least 31 are needed" in reason


@pytest.mark.parametrize(
    ("rules", "node", "cap", "delta"),
    [
        ({"max-epsilon": 4}, {}, 4.0, 1e-5),
        ({"max-epsilon": 4, "delta": 1e-3}, {}, 4.0, 1e-3),
        ({"max-epsilon": 4, "delta": 1e-3}, {"max-epsilon": 8.0}, 4.0, 1e-5),
        ({"max-epsilon": 4}, {"max-epsilon": 2.0, "delta": 1e-6}, 2.0, 1e-6),
        ({"max-epsilon": 0}, {"max-epsilon": 2.0}, 2.0, 1e-5),
        ({"delta": 1e-7}, {"max-epsilon": 2}, 2.0, 1e-7),
    ],
    ids=str,
)
def test_of_two_caps_on_epsilon_the_lower_holds_at_the_lower_delta(
    hospital: Hospital, rules: dict[str, Any], node: dict[str, Any], cap: float, delta: float
) -> None:
    context = hospital(rules, node)
    limited = read_site_file(context).restrict(context).node_config
    assert (limited["max-epsilon"], limited["delta"]) == (cap, delta)


def test_the_files_cap_on_epsilon_keeps_arrays_at_home_once_it_is_spent(
    hospital: Hospital, message: Make, private_weights: dict[str, Any]
) -> None:
    # The label counts once; of each reply two steps over all samples and its measurements
    cap = epsilon({(0.5, 1.0): 1, (6.0, 1.0): 2 * (2 + 1)}, 1e-5) * 1.001
    own = {"max-epsilon": cap, "counts-noise": 0.5}  # ten test patients are told as some
    node = hospital(own, batch_size=10_000, local_steps=2, **PRIVATE)
    replies = [app(message(TRAIN, private_weights, run_name=name), node) for name in "abcd"]
    assert [reply.has_content() for reply in replies] == [True, True, False, False]
    assert f"above the hospital's own 'max-epsilon' {cap:g};" in reason_of(replies[2])
    assert [line["outcome"] for line in log_of(node)] == ["answered"] * 2 + ["refused"] * 2


@pytest.mark.parametrize(
    ("rules", "node", "agreed"),
    [
        ({}, {}, False),
        ({"allow-folds": True}, {}, True),
        ({}, {"allow-folds": True}, True),
        ({"allow-folds": False}, {"allow-folds": True}, False),
        ({"allow-folds": True}, {"allow-folds": False}, False),
    ],
    ids=str,
)
def test_folds_need_a_yes_and_no_no(
    hospital: Hospital, rules: dict[str, bool], node: dict[str, bool], agreed: bool
) -> None:
    context = table_hospital(hospital, rules, val_folds=5)
    context.node_config.update(node)
    if agreed:
        assert app(hello(), context).has_content()
    else:
        assert "choose which of this site's samples" in refusal(context)


@pytest.mark.parametrize("kind", [HELLO, SURVEY, TRAIN, EVALUATE])
def test_the_site_file_is_read_once_and_once_more_before_the_reply_leaves(
    hospital: Hospital,
    message: Callable[..., Message],
    weights: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    reads: list[Path] = []
    read = policy.read_regular

    def counted(path: Path) -> bytes:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(policy, "read_regular", counted)
    if kind in (TRAIN, EVALUATE):
        node, asked = hospital(), message(kind, weights)
    else:
        node = table_hospital(hospital, {"records": ["*", "survey/*"]})
        asked = Message(hello().content, 1001, kind)
    reply = app(asked, node)
    assert reply.has_content(), reply.error
    assert len(reads) == 2


def test_a_method_that_asks_for_consent_may_get_it_from_the_file(hospital: Hospital) -> None:
    assert "'allow-embeddings=true'" in refusal(hospital(method="fedaligncl"))
    assert app(hello(), hospital({"allow-embeddings": True}, method="fedaligncl")).has_content()


def test_every_consent_that_a_method_asks_for_is_a_key_of_the_file(
    silo: Silo, common: CommonSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, asked = session_with(common, silo), set()
    monkeypatch.setattr(SiteSession, "require_consent", lambda self, key, purpose: asked.add(key))
    for name in METHODS:
        site_class(name)(settings_class(name)()).admit(session)
    assert asked == {"allow-embeddings"}
    assert asked <= {key_of(name) for name in SiteFile.__dataclass_fields__}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be used: it is empty"),
        ("# only this\n", "cannot be used: it is empty"),
        ("- fedavg\n", "it is not a list of 'key: value'"),
        ("methods: [\n", "it is not valid YAML (line 2)"),
        ("methods: ['*']\ndatasets: ['*']\n", "it lacks 'records': list what is allowed"),
        ("method: [fedavg]\n", "unknown setting 'method'; did you mean 'methods'?"),
        ("given: {}\n", "unknown setting 'given'"),
        ("methods: [local]\nmethods: ['*']\n", "it has the key 'methods' twice"),
        ("methods: ['*']\nrefused-records: [{a: 1, a: 2}]\n", "it has the key 'a' twice"),
        ("methods: &a [*a]\n", "it refers to itself"),
        ("methods: !!bool maybe\n", "it is not valid YAML"),
        ("methods: ['*']\nmax-rounds: [Smith]\n", "'max-rounds' must be a single value"),
        ("methods: [[Smith]]\n", "'methods' must be a list of texts, such as [\"*\"]"),
        ("methods: fedavg\n", "'methods' must be a list of texts"),
        ("methods: [1]\n", "'methods' must be a list of texts"),
        ("methods: \n", "'methods' must be a list of texts"),
    ],
)
@pytest.mark.usefixtures("unopened")
def test_a_file_that_cannot_be_used_refuses_every_message_in_one_line(
    hospital: Hospital, message: Make, text: str, said: str
) -> None:
    node = hospital(text)
    for asked in (hello(), message(TRAIN), message(EVALUATE)):
        reason = refusal(node, asked)
        assert reason.startswith("site s1a: the site file cannot be used: ")
        assert said in reason
        assert "\n" not in reason
        assert "Smith" not in reason
    assert len(log_of(node)) == 3


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"methods": ["fedvag"]}, "unknown method 'fedvag'.*did you mean 'fedavg'"),
        ({"datasets": ["digit"]}, "unknown data set 'digit'.*did you mean 'digits'"),
        ({"records": ["array/*"]}, "'records' has 'array/.', which must begin with one of arrays/"),
        ({"refused-records": ["head"]}, "'refused-records' has 'head'"),
        ({"max-rounds": "10"}, "'max-rounds' must be a whole number"),
        ({"max-rounds": -1}, "'max-rounds' must be at least 0, but is -1"),
        (
            {"max-epsilon": float("nan")},
            "'max-epsilon' must be a finite number, at least 0, but is nan",
        ),
        ({"delta": 1.0}, "'delta' must be above 0 and below 1, but is 1.0"),
        ({"allow-folds": "yes"}, "'allow-folds' must be true or false"),
        ({"sums-min-count": None}, "'sums-min-count' must be a whole number"),
        ({"audit-log": "audit.jsonl"}, "'audit-log' must be an absolute path"),
        ({7: 1}, "unknown setting '7'"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(hospital: Hospital, rules: dict[Any, Any], said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        read_site_file(hospital(rules))


def test_a_file_that_is_not_there_refuses_and_its_path_stays_at_the_site(
    hospital: Hospital, tmp_path: Path
) -> None:
    node = hospital()
    for gone, said in (
        (tmp_path / "gone.yaml", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (Path("site.yaml"), "must be an absolute path"),
        ("", "must be an absolute path"),
    ):
        node.node_config["site-file"] = str(gone)
        reason = refusal(node)
        assert said in reason
        assert str(tmp_path) not in reason
    (tmp_path / "site.yaml").write_bytes(b"\xff\xfe")
    node.node_config["site-file"] = str(tmp_path / "site.yaml")
    assert "not UTF-8 text" in refusal(node)


def test_the_file_of_another_site_is_refused(hospital: Hospital) -> None:
    reason = refusal(hospital({"site": "north"}))
    assert reason == "site s1a: the site file's 'site' is 'north', but this is site 's1a'"


def test_the_file_is_read_at_each_message_and_never_named_by_the_run(
    hospital: Hospital, tmp_path: Path
) -> None:
    node = hospital()
    node.run_config["site-file"] = "/server/says.yaml"
    assert app(hello(), node).has_content()
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(EVERYTHING | {"methods": ["local"]}))
    assert "does not allow method 'fedavg'" in refusal(node)


def test_a_wrong_limit_in_the_node_config_is_refused_too(hospital: Hospital) -> None:
    assert "'minimum-per-label' must be a whole number" in refusal(
        hospital({}, {"minimum-per-label": "five"})
    )


@pytest.mark.usefixtures("unopened")
def test_a_log_that_cannot_be_opened_is_refused_before_data_are(
    hospital: Hospital, tmp_path: Path
) -> None:
    reply = app(hello(), hospital({"audit-log": str(tmp_path / "no" / "audit.jsonl")}))
    assert reason_of(reply) == (
        "site s1a: the site's audit log cannot be written (No such file or directory), but nothing "
        "leaves unlogged: the hospital must see to its 'audit-log'"
    )


def test_without_a_place_for_the_log_nothing_leaves(hospital: Hospital) -> None:
    node = hospital()
    del node.node_config["state-dir"]
    reply = app(hello(), node)
    assert "name an 'audit-log' in the site file or a 'state-dir'" in reason_of(reply)
    node.node_config["site-file"] = "/gone.yaml"
    told = reason_of(app(hello(), node))
    assert told.index("cannot be read") < told.index("there is no audit log")


def test_on_a_full_disk_a_ready_answer_stays_at_the_site(
    hospital: Hospital, message: Make, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> int:
        raise OSError(28, "No space left on device")

    node = hospital()
    monkeypatch.setattr("fedsilo.client_app.site.audit_log.os.write", fill)
    reply = app(message(TRAIN, weights), node)
    assert "(No space left on device), but nothing leaves unlogged" in reason_of(reply)


def test_an_unforeseen_fault_of_the_log_keeps_the_answer_too(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("63,1,4,140")

    monkeypatch.setattr("fedsilo.client_app.site.audit_log.build_entry", fail)
    reply = app(hello(), hospital())
    assert reason_of(reply) == "site s1a: ValueError (its text is in the site's own log)"


InlineRun = Callable[..., RunDirectory]
Tiny = Callable[..., dict[str, Any]]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives the SuperNodes of inline runs site files: rules, of one site."""

    def give(**rules: Any) -> None:
        configs = []
        for site in ("s1a", "s2a", "s3a"):
            path = tmp_path / f"{site}.yaml"
            own = rules if site == "s2a" else {}
            path.write_text(yaml.safe_dump(EVERYTHING | {"site": site} | own))
            home = tmp_path / "home" / site
            (home / ".own" / site).mkdir(parents=True, exist_ok=True)
            (home / ".own" / site / "seed").write_text(f"{TINY['seed']}\n")  # the simulation's
            configs.append(
                {"site": site, "state-dir": str(home), "trust": "server", "site-file": str(path)}
            )
        monkeypatch.setattr("fedsilo.engines.inline_engine.partition_configs", lambda _: configs)

    return give


def test_a_run_under_site_files_ends_as_one_without_them(
    tiny: Tiny, inline_run: InlineRun, nodes: Callable[..., None], tmp_path: Path
) -> None:
    plain = inline_run(tiny("fedproto"), out=tmp_path / "plain")
    nodes()
    under = inline_run(tiny("fedproto"), out=tmp_path / "under")
    found = [json.loads((run.path / "summary.json").read_text())["mean"] for run in (plain, under)]
    assert found[0] == found[1]
    for site in ("s1a", "s2a", "s3a"):
        log = (tmp_path / "home" / site / ".own" / site / "audit.jsonl").read_text().splitlines()
        assert [json.loads(line)["phase"] for line in log] == ["", "train", "train", "evaluate"]
        assert json.loads(log[1])["records"]["arrays/prototype/*"] == 10


def test_the_server_is_told_which_site_refuses_by_which_key(
    tiny: Tiny, inline_run: InlineRun, nodes: Callable[..., None], tmp_path: Path
) -> None:
    nodes(methods=["local"])
    with pytest.raises(SiteError, match=r"site s2a: the site file does not allow method 'fedavg'"):
        inline_run(tiny("fedavg"))
    nodes(**{"refused-records": ["arrays/*"]})
    with pytest.raises(SiteError, match=r"s2a.*does not let arrays/encoder\.\*, arrays/head\.\*"):
        inline_run(tiny("fedavg"), out=tmp_path / "second")


def test_the_example_is_a_site_file_under_which_a_run_of_its_method_is_answered(
    hospital: Hospital, message: Make, private_weights: dict[str, Any]
) -> None:
    rules = yaml.safe_load(EXAMPLE.read_text())
    assert {key_of(name) for name in SiteFile.__dataclass_fields__} - {"given"} == rules.keys()
    del rules["audit-log"], rules["site"], rules["minimum-train-samples"]
    rules |= LOW
    node = hospital(rules | {"datasets": ["digits"]}, trust="nobody", **PRIVATE)
    assert app(hello(), node).has_content()
    assert app(message(TRAIN, private_weights), node).has_content()
    assert os.path.isabs(yaml.safe_load(EXAMPLE.read_text())["audit-log"])
