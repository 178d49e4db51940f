import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import CONFIG
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SiteFacts
from fedsilo.core.versions import FEDSILO
from fedsilo.engines.inline_engine import InlineGrid, partition_configs
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.strategies.meeting import waiting
from fedsilo.strategies.meeting.participants import (
    Participants,
    grouped_refusals,
    meet_sites,
)
from fedsilo.strategies.meeting.waiting import wait_for_nodes
from fedsilo.strategies.wire.records import record_bytes
from tests.support.errors import refuses

COMMON = CommonSettings(silos=3)
ONE = dataclasses.replace(COMMON, min_sites=1)
hello_app = ClientApp()


def digest(data: object) -> str:
    """Return the fingerprint of what a test calls some samples."""
    return hashlib.sha256(str(data).encode()).hexdigest()


def counts(classes: int) -> dict[str, list[int]]:
    """Return samples of the first two classes."""
    none = [0] * (classes - 2)
    return {"train": [20, 16, *none], "test": [3, 2, *none]}


@hello_app.query("hello")
def _hello(message: Message, context: Context) -> Message:
    """Answer as a site whose node config says all that the tests look at."""
    config = context.node_config
    if "broken" in config:
        raise ValueError(str(config["broken"]))
    facts: dict[str, Any] = {
        "site": str(config["site"]),
        "distribution": "D1",
        "input-shape": [1, int(config.get("side", 16)), 16],
        "classes": int(config.get("classes", 10)),
        "label-counts": json.dumps(counts(int(config.get("classes", 10)))),
        "fingerprints": json.dumps({"train": digest(config.get("data", config["site"]))}),
        "simulated": bool(config.get("simulated", False)),
        "features": json.dumps([]),
        "dropped": 0,
        "schema": str(config.get("schema", "")),
        "backbone": str(config.get("backbone", "")),
        "class-names": json.dumps([]),
        "floor": int(config.get("floor", 10)),
        "measured": json.dumps(["train", "val", "test"]),
    }
    facts |= json.loads(str(config.get("says", "{}")))
    if "lacks" in config:
        del facts[str(config["lacks"])]
    return Message(RecordDict({CONFIG: ConfigRecord(facts)}), reply_to=message)


def grid_of(*configs: Mapping[str, Any]) -> InlineGrid:
    return InlineGrid(hello_app, {}, configs)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(["s1a", "s2a", "s3a"]))
def test_sites_are_sorted_by_name_whatever_their_node_ids(order: list[str]) -> None:
    participants = meet_sites(grid_of(*({"site": site} for site in order)), COMMON)
    assert (
        participants.sites()
        == list(participants.facts)
        == list(participants.nodes)
        == ["s1a", "s2a", "s3a"]
    )
    assert participants.nodes == {site: 1001 + order.index(site) for site in order}


def test_the_real_sites_say_what_they_hold(tiny: Callable[..., dict[str, Any]]) -> None:
    from fedsilo.client_app.app import app
    from fedsilo.server_app.config.settings import resolve

    values = resolve(tiny("fedavg"))
    participants = meet_sites(
        InlineGrid(app, values.as_mapping(), partition_configs(3)), values.common
    )
    assert participants.sites() == ["s1a", "s2a", "s3a"]
    assert [facts.distribution for facts in participants.facts.values()] == ["D1", "D2", "D3"]
    assert participants.facts["s2a"].sizes == {"train": 36, "val": 4, "test": 10}
    assert participants.shape() == NetworkShape((1, 16, 16), 10)


@pytest.mark.parametrize("simulated", [True, False])
def test_the_facts_of_a_site_arrive_as_they_were_said(simulated: bool) -> None:
    facts = meet_sites(grid_of({"site": "s1a", "simulated": simulated}), COMMON).facts["s1a"]
    given = (counts(10), {"train": digest("s1a")}, simulated)
    assert facts == SiteFacts("s1a", "D1", (1, 16, 16), 10, *given, floor=10)
    assert (facts.features, facts.sums, facts.dropped, facts.schema) == ((), None, 0, "")
    assert facts.sizes == {"train": 36, "test": 5}


@pytest.mark.parametrize("common", [COMMON, ONE])
def test_of_two_nodes_of_one_site_the_first_takes_part_and_the_other_is_named(
    common: CommonSettings,
) -> None:
    met = meet_sites(grid_of({"site": "s1a"}, {"site": "s2a"}, {"site": "s1a"}), common, silos=2)
    assert met.nodes == {"s1a": 1001, "s2a": 1002}
    (said,) = met.refused
    assert said.startswith("s1a: another SuperNode is already that site, so node 1003 is left out")
    assert 1003 not in met.asked, "it is asked again, and joins once the first one is gone"


def test_of_two_simulated_sites_of_one_name_none_takes_part() -> None:
    nodes = [{"site": site, "simulated": True} for site in ("s1a", "s2a", "s1a")]
    with pytest.raises(SiteError, match="two SuperNodes say that they are site 's1a'"):
        meet_sites(grid_of(*nodes), COMMON)
    assert meet_sites(grid_of(*nodes), ONE).sites() == ["s2a"]


def test_two_sites_with_the_same_training_samples_stop_the_run() -> None:
    sites = {"site": "s1a", "data": "x"}, {"site": "s2a"}, {"site": "s3a", "data": "x"}
    with refuses(SiteError, "s1a", "s3a"):
        meet_sites(grid_of(*sites), COMMON)
    going_on = meet_sites(grid_of(*sites), ONE)
    assert (going_on.sites(), len(going_on.refused)) == (["s2a"], 1)
    empty = json.dumps({"label-counts": json.dumps({"train": [0] * 10, "test": [3] * 10})})
    nothing = ({**site, "says": empty} for site in sites)
    assert meet_sites(grid_of(*nothing), COMMON).sites() == ["s1a", "s2a", "s3a"]


def test_more_nodes_than_silos_stop_the_run() -> None:
    grid = grid_of(*({"site": name} for name in "abc"))
    with refuses(SiteError, 3, 2):
        wait_for_nodes(grid, COMMON, silos=2)
    with pytest.raises(SiteError, match="there are 2 silos"):
        meet_sites(grid, COMMON, silos=2)


def test_as_many_nodes_come_as_there_are_silos_and_any_number_where_only_the_sites_know() -> None:
    grid = grid_of(*({"site": name} for name in "abc"))
    one = dataclasses.replace(COMMON, silos=1)  # the number is an argument, not the setting
    assert wait_for_nodes(grid, one, silos=3) == [1001, 1002, 1003]
    assert wait_for_nodes(grid, one) == [1001, 1002, 1003]


@pytest.mark.parametrize(("min_sites", "needed"), [(3, 3), (0, 1)])
def test_too_few_nodes_stop_the_run_when_the_time_is_up(
    min_sites: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_JOIN_SECONDS", 0.0)
    configs = [{"site": "s1a"}] * (2 if min_sites else 0)
    with refuses(SiteError, 0, needed, "run.min-sites"):
        wait_for_nodes(grid_of(*configs), dataclasses.replace(COMMON, min_sites=min_sites))


def test_a_node_that_connects_late_is_waited_for() -> None:
    class Growing(InlineGrid):
        asked = 0

        def get_node_ids(self) -> list[int]:
            self.asked += 1
            return [1003, 1001, 1002][: self.asked]

    grid = Growing(hello_app, {}, [])
    late = dataclasses.replace(COMMON, min_sites=3)
    assert wait_for_nodes(grid, late) == [1001, 1002, 1003]
    assert grid.asked == 3


REFUSING = ({"site": "s3a"}, {"broken": "no such silo"}, {"site": "s1a"}, {"broken": "too few"})


@pytest.mark.parametrize(("min_sites", "needed"), [(0, 4), (3, 3), (4, 4)])
def test_sites_that_cannot_take_part_stop_the_run_with_all_their_reasons(
    min_sites: int, needed: int
) -> None:
    told = (
        r"^a site cannot take part: .*no such silo; .*too few -- 2 of 4 can, but "
        rf"{needed} are needed \('run.min-sites'\)$"
    )
    with pytest.raises(SiteError, match=told):
        meet_sites(grid_of(*REFUSING), dataclasses.replace(COMMON, min_sites=min_sites))


def test_the_end_of_a_long_reason_says_what_to_do_and_stays() -> None:
    advice = f"correct the file {'or its schema ' * 12}in {'folder/' * 8}north.csv"
    broken = {"broken": f"{'long/path/' * 60}: {advice}"}
    met = meet_sites(grid_of({"site": "s1a"}, broken), dataclasses.replace(COMMON, min_sites=1))
    (told,) = met.refused
    assert advice in told


def test_refusals_of_one_reason_are_one_line_with_its_sites() -> None:
    refused = ["s2: no files: fetch them", "s1: no files: fetch them", "s3: too few", "nobody"]
    told = ["nobody", "s1, s2: no files: fetch them", "s3: too few"]
    assert grouped_refusals(refused) == told


@pytest.mark.parametrize("min_sites", [1, 2])
def test_with_min_sites_the_others_go_on_and_the_roster_says_who_could_not(min_sites: int) -> None:
    participants = meet_sites(grid_of(*REFUSING), dataclasses.replace(COMMON, min_sites=min_sites))
    assert participants.nodes == {"s1a": 1003, "s3a": 1001}
    assert participants.sites() == list(participants.facts) == ["s1a", "s3a"]
    assert participants.traffic.keys() == {"s1a", "s3a"}
    first, second = participants.refused
    assert "no such silo" in first
    assert "too few" in second
    assert meet_sites(grid_of({"site": "s1a"}), COMMON).refused == ()


@pytest.mark.parametrize(
    "key",
    [
        *("site", "distribution", "input-shape", "classes", "label-counts", "fingerprints"),
        *("simulated", "features", "dropped", "schema", "backbone", "class-names"),
        *("floor", "measured"),
    ],
)
def test_a_hello_that_lacks_a_key_stops_the_run_and_names_the_key(key: str) -> None:
    with refuses(SiteError, key):
        meet_sites(grid_of({"site": "s1a"}, {"site": "s2a", "lacks": key}), COMMON)


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"train": [1] * 9}, "of train have 9 numbers, not 10"),
        ({"train": [1] * 10, "test": [1] * 11}, "of test have 11 numbers, not 10"),
        ({"train": [1] * 9 + [-1]}, "of train are not whole numbers of 0 or more"),
        (
            {"train": [1] * 9 + [0.5]},
            "'label-counts', 'train', '9': Input should be a valid integer",
        ),
        ({"train": [1] * 9 + [True]}, "'9': Input should be a valid integer"),
        ({"train": [1] * 9 + ["1"]}, "'9': Input should be a valid integer"),
        ({"train": 10}, "'label-counts', 'train': Input should be a valid array"),
        ([], "'label-counts': Input should be an object"),
        ({}, "it has no 'label-counts'"),
    ],
)
def test_label_counts_that_cannot_be_are_an_unreadable_hello(said: Any, fault: str) -> None:
    node = {"site": "s2a", "says": json.dumps({"label-counts": json.dumps(said)})}
    with pytest.raises(SiteError, match=f"hello cannot be read .*{fault}"):
        meet_sites(grid_of({"site": "s1a"}, node), COMMON)


@pytest.mark.parametrize(
    ("software", "site"),
    [
        ('{"fedsilo": "0.0.9", "revision": "12345"}', "fedsilo 0.0.9, revision 12345"),
        ('{"fedsilo": "9\\n9", "flower": ["1", "2"]}', "fedsilo 9 9, flower ['1', '2']"),
        ("{", ""),
        ("[1]", ""),
        ("{}", ""),
    ],
)
def test_an_unreadable_hello_is_refused_with_the_versions_of_both(software: str, site: str) -> None:
    node = {"site": "s2a", "says": json.dumps({"software": software}), "lacks": "schema"}
    with pytest.raises(SiteError) as refused:
        meet_sites(grid_of({"site": "s1a"}, node), COMMON)
    assert f"fedsilo {FEDSILO}" in str(refused.value)
    assert site in str(refused.value)


def test_a_hospitals_floor_arrives() -> None:
    participants = meet_sites(grid_of({"site": "s1a", "floor": 30}, {"site": "s2a"}), COMMON)
    assert [facts.floor for facts in participants.facts.values()] == [30, 10]


def test_the_bytes_of_the_hello_are_counted_in_both_directions() -> None:
    class Keeping(InlineGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            self.asked = {m.metadata.dst_node_id: m for m in messages}
            return super().push_messages(list(self.asked.values()))

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            found = list(super().pull_messages(message_ids))
            before = getattr(self, "received", {})
            self.received = {m.metadata.src_node_id: m for m in found} | before
            return found

    grid = Keeping(hello_app, {}, [{"site": "s2a"}, {"site": "s1a", "simulated": True}])
    participants = meet_sites(grid, COMMON)
    assert participants.traffic == {
        site: (record_bytes(grid.asked[node].content), record_bytes(grid.received[node].content))
        for site, node in participants.nodes.items()
    }
    assert all(down > 0 and up > 100 for down, up in participants.traffic.values())


@pytest.mark.parametrize("other", [{"side": 28}, {"classes": 9}])
def test_sites_of_another_input_shape_or_classes_are_refused(other: dict[str, int]) -> None:
    nodes = {"site": "s1a"}, {"site": "s2a", **other}
    with refuses(SiteError, "s2a", "s1a"):
        meet_sites(grid_of(*nodes), COMMON)
    assert meet_sites(grid_of(*nodes), ONE).shape() == NetworkShape((1, 16, 16), 10)


def test_sites_with_another_backbone_are_refused_by_both_names() -> None:
    nodes = [{"site": "s1a", "backbone": "ab"}, {"site": "s2a", "backbone": "cd"}]
    with refuses(SiteError, "s2a", "s1a"):
        meet_sites(grid_of(*nodes), COMMON)
    alike = meet_sites(grid_of(nodes[0], {"site": "s2a", "backbone": "ab"}), COMMON)
    assert alike.shape().outputs == 10


def test_sites_of_another_schema_are_refused_by_both_names() -> None:
    nodes = [{"site": "s1a", "schema": "ab"}, {"site": "s2a", "schema": "cd"}]
    with refuses(SiteError, "s2a", "s1a"):
        meet_sites(grid_of(*nodes), COMMON)
    assert meet_sites(grid_of(*nodes), ONE).facts["s1a"].schema == "ab"
    alike = meet_sites(grid_of(nodes[0], {"site": "s2a", "schema": "ab"}), COMMON)
    assert alike.shape() == NetworkShape((1, 16, 16), 10)


def test_one_site_alone_has_a_task() -> None:
    facts = SiteFacts("s1a", "D1", (3, 8, 8), 2, {}, {})
    assert Participants({"s1a": facts}, {"s1a": 5}).shape() == NetworkShape((3, 8, 8), 2)


# Rows of s1a: (1, 10) and (3, missing); of s2a: (5, 20).
SUMS = {
    "s1a": {
        "sums-count": [2, 1],
        "sums-total": [4.0, 10.0],
        "sums-squares": [10.0, 100.0],
    },
    "s2a": {
        "sums-count": [1, 1],
        "sums-total": [5.0, 20.0],
        "sums-squares": [25.0, 400.0],
    },
}


def table_node(site: str, features: Iterable[str] = ("age", "chol"), **says: Any) -> dict[str, str]:
    """Return a node that holds a table; ``None`` leaves a part of the sums out."""
    told = {
        "features": json.dumps(list(features)),
        "input-shape": [2],
        "dropped": 3,
        **SUMS[site],
        **{key.replace("_", "-"): value for key, value in says.items()},
    }
    kept = {key: value for key, value in told.items() if value is not None}
    return {"site": site, "says": json.dumps(kept)}


def test_a_table_names_its_features_its_sums_and_the_rows_it_left_out() -> None:
    facts = meet_sites(grid_of(table_node("s1a")), COMMON).facts["s1a"]
    assert (facts.features, facts.dropped) == (("age", "chol"), 3)
    assert facts.input_shape == (2,)
    assert facts.sums is not None
    assert facts.sums.count.tolist() == [2, 1]
    assert facts.sums.total.tolist() == [4, 10]
    assert facts.sums.squares.tolist() == [10, 100]


def test_pooled_statistics_are_those_of_the_rows_of_all_sites() -> None:
    statistics = meet_sites(grid_of(table_node("s2a"), table_node("s1a")), COMMON).standardisation()
    assert statistics is not None
    assert statistics.mean.tolist() == pytest.approx([3, 15])
    assert statistics.std.tolist() == pytest.approx([(8 / 3) ** 0.5, 5])


def test_what_leaves_for_pooled_statistics_is_told_and_where_they_go() -> None:
    (told,) = meet_sites(grid_of(table_node("s2a"), table_node("s1a")), COMMON).leaves()
    assert "the sum of their squares over the site's training rows" in told
    assert told.endswith("mean and standard deviation pooled from them go to all sites")
    assert meet_sites(grid_of({"site": "s1a"}), COMMON).leaves() == []


def test_the_real_sites_send_sums_whose_statistics_are_those_of_all_training_rows() -> None:
    from fedsilo.client_app.app import app
    from fedsilo.datasets.registry import load_silo, silo_names
    from fedsilo.server_app.config.settings import resolve

    values = resolve({"method": "fedavg", "dataset": "heart-synthetic"})
    participants = meet_sites(
        InlineGrid(app, values.as_mapping(), partition_configs(4)), values.common
    )
    silos = [load_silo(name, values.common) for name in silo_names(values.common)]
    rows = np.concatenate([silo.train.inputs.numpy() for silo in silos]).astype(np.float64)
    statistics = participants.standardisation()
    assert statistics is not None
    np.testing.assert_allclose(statistics.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(statistics.std, rows.std(axis=0), rtol=1e-9)
    assert participants.shape() == NetworkShape((13,), 2)


def test_sites_that_send_no_sums_have_no_pooled_figures() -> None:
    silent = {"sums_count": None, "sums_total": None, "sums_squares": None}
    nodes = [table_node(site, **silent) for site in SUMS]
    assert meet_sites(grid_of(*nodes), COMMON).standardisation() is None
    assert meet_sites(grid_of({"site": "s1a"}), COMMON).standardisation() is None


def test_sums_of_some_sites_only_are_refused_and_the_silent_ones_named() -> None:
    nodes = table_node("s1a"), table_node("s2a", sums_count=None)
    with refuses(SiteError, "s2a", "standardise"):
        meet_sites(grid_of(*nodes), COMMON)
    assert meet_sites(grid_of(*nodes), ONE).sites() == ["s1a"]
    declared = dataclasses.replace(ONE, standardise="declared")
    going_on = meet_sites(grid_of(*nodes), declared)
    assert (going_on.sites(), going_on.standardisation()) == (["s2a"], None)
    assert going_on.refused[0].startswith("s1a sent sums that nobody pools")


@pytest.mark.parametrize("part", ["count", "total", "squares"])
@pytest.mark.parametrize(
    "values", [[1.0], [1.0, 2.0, 3.0], [1.0, float("nan")], [float("inf"), 1.0]]
)
def test_sums_of_a_wrong_length_or_that_are_not_finite_stop_the_run(
    part: str, values: list[float]
) -> None:
    bad = table_node("s2a", **{f"sums_{part}": values})
    with refuses(SiteError, f"sums-{part}", 2):
        meet_sites(grid_of(table_node("s1a"), bad), COMMON)


@pytest.mark.parametrize("part", ["count", "squares"])
def test_sums_that_no_rows_have_stop_the_run(part: str) -> None:
    bad = table_node("s2a", **{f"sums_{part}": [1.0, -1.0]})
    with refuses(SiteError, f"sums-{part}", 0):
        meet_sites(grid_of(table_node("s1a"), bad), COMMON)
    below = table_node("s2a", sums_total=[-5.0, 20.0])  # values may be below 0, and so their sum
    statistics = meet_sites(grid_of(table_node("s1a"), below), COMMON).standardisation()
    assert statistics is not None
    assert statistics.mean.tolist() == pytest.approx([-1 / 3, 15])


@pytest.mark.parametrize("part", ["total", "squares"])
def test_a_hello_with_only_a_part_of_the_sums_stops_the_run_and_names_the_part(part: str) -> None:
    with refuses(SiteError, f"sums-{part}"):
        meet_sites(grid_of(table_node("s1a", **{f"sums_{part}": None})), COMMON)


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (("age", "weight"), r"\(\['chol', 'weight'\]\)"),
        (("chol", "age"), r"\(the same in another order\)"),
    ],
)
def test_sites_of_other_features_are_refused_with_the_difference(
    features: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SiteError, match=f"features of sites s2a and s1a differ {said}"):
        meet_sites(grid_of(table_node("s1a"), table_node("s2a", features)), COMMON)
    alike = meet_sites(grid_of(table_node("s1a"), table_node("s2a")), COMMON)
    assert alike.shape() == NetworkShape((2,), 10)
