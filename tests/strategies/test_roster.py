from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

from models.contract import CONFIG, SiteFacts
from models.errors import SiteError
from models.networks import Task
from models.settings import CommonSettings
from server_app.inline import InlineGrid, partition_configs
from strategies.roster import Roster, meet_sites, wait_for_nodes
from strategies.state import record_bytes

COMMON = CommonSettings(silos=3, join_timeout=0.0)
hello_app = ClientApp()


@hello_app.query("hello")
def _hello(message: Message, context: Context) -> Message:
    """Answer as a site whose node config says all that the tests look at."""
    config = context.node_config
    if "broken" in config:
        raise ValueError(str(config["broken"]))
    facts: dict[str, Any] = {
        "site": str(config["site"]),
        "distribution": "D1",
        "image-shape": [1, int(config.get("side", 16)), 16],
        "classes": int(config.get("classes", 10)),
        "label-counts": json.dumps({"train": [20, 16], "test": [3, 2]}),
        "fingerprints": json.dumps({"train": "ab"}),
        "homeless": bool(config.get("homeless", False)),
    }
    if "lacks" in config:
        del facts[str(config["lacks"])]
    return Message(RecordDict({CONFIG: ConfigRecord(facts)}), reply_to=message)


def grid_of(*configs: Mapping[str, Any]) -> InlineGrid:
    return InlineGrid(hello_app, {}, configs)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(["s1a", "s2a", "s3a"]))
def test_sites_are_sorted_by_name_whatever_their_node_ids(order: list[str]) -> None:
    roster = meet_sites(grid_of(*({"site": site} for site in order)), COMMON)
    assert roster.sites() == list(roster.facts) == list(roster.nodes) == ["s1a", "s2a", "s3a"]
    assert roster.nodes == {site: 1001 + order.index(site) for site in order}


def test_the_real_sites_say_what_they_hold(tiny: Callable[..., dict[str, Any]]) -> None:
    from client_app.app import app
    from server_app.config import resolve

    values = resolve(tiny("fedavg"))
    roster = meet_sites(InlineGrid(app, values.as_mapping(), partition_configs(3)), values.common)
    assert roster.sites() == ["s1a", "s2a", "s3a"]
    assert [facts.distribution for facts in roster.facts.values()] == ["D1", "D2", "D3"]
    assert roster.facts["s2a"].sizes() == {"train": 36, "val": 4, "test": 10}
    assert roster.task() == Task((1, 16, 16), 10)


@pytest.mark.parametrize("homeless", [True, False])
def test_the_facts_of_a_site_arrive_as_they_were_said(homeless: bool) -> None:
    facts = meet_sites(grid_of({"site": "s1a", "homeless": homeless}), COMMON).facts["s1a"]
    counts = {"train": [20, 16], "test": [3, 2]}
    assert facts == SiteFacts("s1a", "D1", (1, 16, 16), 10, counts, {"train": "ab"}, homeless)
    assert facts.sizes() == {"train": 36, "test": 5}


def test_two_nodes_that_claim_one_site_stop_the_run() -> None:
    with pytest.raises(SiteError, match="two SuperNodes say that they are site 's1a'"):
        meet_sites(grid_of({"site": "s1a"}, {"site": "s2a"}, {"site": "s1a"}), COMMON)


def test_more_nodes_than_silos_stop_the_run() -> None:
    with pytest.raises(SiteError, match="3 SuperNodes are connected and 'silos' is 2"):
        wait_for_nodes(
            grid_of(*({"site": name} for name in "abc")), dataclasses.replace(COMMON, silos=2)
        )


@pytest.mark.parametrize(("min_sites", "needed"), [(3, 3), (0, 1)])
def test_too_few_nodes_stop_the_run_when_the_time_is_up(min_sites: int, needed: int) -> None:
    configs = [{"site": "s1a"}] * (2 if min_sites else 0)
    with pytest.raises(SiteError, match=rf"after 0 s and {needed} are needed \('min-sites'\)"):
        wait_for_nodes(grid_of(*configs), dataclasses.replace(COMMON, min_sites=min_sites))


def test_a_node_that_connects_late_is_waited_for() -> None:
    class Growing(InlineGrid):
        asked = 0

        def get_node_ids(self) -> list[int]:
            self.asked += 1
            return [1003, 1001, 1002][: self.asked]

    grid = Growing(hello_app, {}, [])
    late = dataclasses.replace(COMMON, min_sites=3, join_timeout=30.0)
    assert wait_for_nodes(grid, late) == [1001, 1002, 1003]
    assert grid.asked == 3


def test_a_site_that_cannot_say_who_it_is_stops_the_run_with_its_reason() -> None:
    with pytest.raises(SiteError, match=r"cannot take part: .*no such silo"):
        meet_sites(grid_of({"site": "s1a"}, {"broken": "no such silo"}), COMMON)


@pytest.mark.parametrize(
    "key",
    ["site", "distribution", "image-shape", "classes", "label-counts", "fingerprints", "homeless"],
)
def test_a_hello_that_lacks_a_key_stops_the_run_and_names_the_key(key: str) -> None:
    with pytest.raises(SiteError, match=f"hello cannot be read .*'{key}'.*different versions"):
        meet_sites(grid_of({"site": "s1a"}, {"site": "s2a", "lacks": key}), COMMON)


def test_the_bytes_of_the_hello_are_counted_in_both_directions() -> None:
    class Keeping(InlineGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            self.asked = {m.metadata.dst_node_id: m for m in messages}
            return super().push_messages(list(self.asked.values()))

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            found = list(super().pull_messages(message_ids))
            self.came = {m.metadata.src_node_id: m for m in found} | getattr(self, "came", {})
            return found

    grid = Keeping(hello_app, {}, [{"site": "s2a"}, {"site": "s1a", "homeless": True}])
    roster = meet_sites(grid, COMMON)
    assert roster.traffic == {
        site: (record_bytes(grid.asked[node].content), record_bytes(grid.came[node].content))
        for site, node in roster.nodes.items()
    }
    assert all(down > 0 and up > 100 for down, up in roster.traffic.values())


@pytest.mark.parametrize("other", [{"side": 28}, {"classes": 9}])
def test_sites_of_another_image_shape_or_classes_are_refused(other: dict[str, int]) -> None:
    roster = meet_sites(grid_of({"site": "s1a"}, {"site": "s2a", **other}), COMMON)
    with pytest.raises(SiteError, match=r"site s2a holds .* site s1a .*same image shape"):
        roster.task()


def test_one_site_alone_has_a_task() -> None:
    facts = SiteFacts("s1a", "D1", (3, 8, 8), 2, {}, {})
    assert Roster({"s1a": facts}, {"s1a": 5}).task() == Task((3, 8, 8), 2)
