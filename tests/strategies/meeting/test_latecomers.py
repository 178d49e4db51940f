"""Sites that connect once a run has begun: who is asked, who may join, and what a run then does."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

import fedsilo.engines.inline_engine
from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import ARRAYS, CONFIG
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import InlineGrid
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.meeting import hello
from fedsilo.strategies.meeting.participants import Participants, meet_latecomers, meet_sites
from tests.strategies.meeting.test_participants import hello_app
from tests.support.soak import in_soak

COMMON = CommonSettings(silos=3)


class ChangingGrid(InlineGrid):
    """A grid of which only the nodes in ``connected`` are there; it keeps whom it asks."""

    def __init__(self, *configs: Mapping[str, Value]) -> None:
        super().__init__(hello_app, {}, configs)
        self.connected = list(self._contexts)
        self.asked: list[int] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.connected)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = list(messages)
        self.asked += [message.metadata.dst_node_id for message in pushed]
        return super().push_messages(pushed)


def met(*configs: Mapping[str, Value], at_first: int) -> tuple[ChangingGrid, Participants]:
    """Return a grid all of whose nodes are connected, and the participants of the first ones."""
    grid = ChangingGrid(*configs)
    everyone, grid.connected = grid.connected, grid.connected[:at_first]
    participants = meet_sites(grid, COMMON)
    grid.connected, grid.asked = everyone, []
    return grid, participants


def test_where_nobody_is_new_nobody_is_asked() -> None:
    grid, participants = met({"site": "s1a"}, {"site": "s2a"}, at_first=2)
    assert meet_latecomers(grid, participants) == (participants, [])
    grid.connected = [1001]  # and one may be away
    assert meet_latecomers(grid, participants) == (participants, [])
    assert grid.asked == []


def test_a_new_node_is_given_up_after_the_time_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, participants = met({"site": "s1a"}, {"site": "s2a"}, at_first=1)
    waits: list[float] = []

    def send(grid: object, messages: object, timeout: float, away: float) -> Iterable[Any]:
        waits.append(away)
        return []

    monkeypatch.setattr(hello, "send_and_receive", send)
    meet_latecomers(grid, participants, away_timeout=7.0)
    assert waits == [7.0]


def test_new_sites_join_sorted_by_name_and_only_they_are_asked() -> None:
    grid, participants = met({"site": "s2a"}, {"site": "s3a"}, {"site": "s1a"}, at_first=1)
    joined, refused = meet_latecomers(grid, participants)
    assert refused == []
    assert grid.asked == [1002, 1003]
    assert joined.sites() == list(joined.facts) == list(joined.nodes) == ["s1a", "s2a", "s3a"]
    assert joined.nodes == {"s1a": 1003, "s2a": 1001, "s3a": 1002}
    assert joined.asked == {1001, 1002, 1003}
    assert joined.facts["s1a"].sizes == {"train": 36, "test": 5}
    assert all(down > 0 and up > 0 for down, up in joined.traffic.values())
    assert joined.traffic.keys() == {"s1a", "s2a", "s3a"}
    assert participants.sites() == ["s2a"], "the participants that was is left as it was"
    assert meet_latecomers(grid, joined) == (joined, [])


def test_a_node_that_cannot_take_part_is_told_of_once_and_not_asked_again() -> None:
    grid, participants = met({"site": "s1a"}, {"broken": "no such silo"}, at_first=1)
    after, (reason,) = meet_latecomers(grid, participants)
    assert "no such silo" in reason
    assert after.refused == (reason,)
    assert (after.facts, after.nodes) == (participants.facts, participants.nodes)
    assert after.asked == {1001, 1002}
    assert meet_latecomers(grid, after) == (after, [])
    assert grid.asked == [1002]


def test_a_node_that_was_refused_before_the_run_is_not_asked_again() -> None:
    grid = ChangingGrid({"site": "s1a"}, {"broken": "too few"})
    participants = meet_sites(grid, dataclasses.replace(COMMON, min_sites=1))
    grid.asked = []
    assert meet_latecomers(grid, participants) == (participants, [])
    assert grid.asked == []


def test_a_second_supernode_of_a_connected_site_is_refused_and_the_first_stays() -> None:
    grid, participants = met({"site": "s1a"}, {"site": "s1a"}, {"site": "s2a"}, at_first=1)
    after, (reason,) = meet_latecomers(grid, participants)
    assert reason.startswith("s1a: another SuperNode is already that site")
    assert after.nodes == {"s1a": 1001, "s2a": 1003}, "the other one joins all the same"


def test_a_second_supernode_takes_over_once_the_first_is_gone_and_is_told_of_once() -> None:
    grid, participants = met({"site": "s1a"}, {"site": "s2a"}, {"site": "s1a"}, at_first=2)
    after, (reason,) = meet_latecomers(grid, participants)
    again, refused = meet_latecomers(grid, after)
    assert (refused, again.refused, again.nodes) == ([], (reason,), participants.nodes)
    grid.connected = [1002, 1003]
    taken, refused = meet_latecomers(grid, again)
    assert refused == []
    assert taken.nodes == {"s1a": 1003, "s2a": 1002}


def test_an_answer_that_cannot_be_read_shuts_out_its_own_node_alone() -> None:
    odd = {"site": "s2a", "lacks": "schema"}
    grid, participants = met({"site": "s1a"}, odd, {"site": "s3a"}, at_first=1)
    after, (reason,) = meet_latecomers(grid, participants)
    assert "hello cannot be read (KeyError: 'schema')" in reason
    assert after.sites() == ["s1a", "s3a"]
    assert meet_latecomers(grid, after) == (after, [])


def test_why_others_were_left_out_is_remembered_when_a_site_joins() -> None:
    grid = ChangingGrid({"site": "s1a"}, {"broken": "too few"}, {"broken": "no"}, {"site": "s2a"})
    grid.connected = [1001, 1002]
    participants = meet_sites(grid, dataclasses.replace(COMMON, min_sites=1))
    grid.connected = [1001, 1002, 1003, 1004]
    after, (reason,) = meet_latecomers(grid, participants)
    assert after.sites() == ["s1a", "s2a"]
    assert after.refused == (*participants.refused, reason)
    assert "too few" in after.refused[0]


def test_of_two_new_supernodes_of_one_site_the_first_joins() -> None:
    grid, participants = met({"site": "s1a"}, {"site": "s2a"}, {"site": "s2a"}, at_first=1)
    after, (reason,) = meet_latecomers(grid, participants)
    assert reason.startswith("s2a: another SuperNode is already that site")
    assert after.nodes == {"s1a": 1001, "s2a": 1002}


def test_a_site_that_comes_back_on_another_node_takes_its_place() -> None:
    grid, participants = met({"site": "s1a"}, {"site": "s2a"}, {"site": "s1a"}, at_first=2)
    grid.connected = [1002, 1003]
    after, refused = meet_latecomers(grid, participants)
    assert refused == []
    assert after.nodes == {"s1a": 1003, "s2a": 1002}
    assert after.facts == participants.facts
    assert grid.asked == [1003]


def test_a_latecomer_with_the_data_of_another_site_is_refused() -> None:
    grid, participants = met({"site": "s1a"}, {"site": "s2a", "data": "s1a"}, at_first=1)
    grid.connected = [1001, 1002]
    after, (reason,) = meet_latecomers(grid, participants)
    assert reason.startswith("s2a: sites s1a and s2a hold the same training samples")
    assert after.sites() == ["s1a"]


def test_a_site_that_comes_back_with_other_data_is_refused() -> None:
    grid, participants = met(
        {"site": "s1a"}, {"site": "s2a"}, {"site": "s1a", "data": "cd"}, at_first=2
    )
    grid.connected = [1002, 1003]
    after, refused = meet_latecomers(grid, participants)
    assert refused == ["s1a: it comes back with other data: start a new run"]
    assert after.nodes == participants.nodes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"side": 28}, r"s2a: site s2a holds .*\(1, 28, 16\).*same input shape and classes"),
        (
            {"backbone": "other"},
            r"s2a: the backbones of sites s2a and s1a differ .*the same 'vit.backbone-weights'",
        ),
    ],
)
def test_a_latecomer_of_another_task_or_backbone_is_refused_with_the_reason(
    change: dict[str, Value], said: str
) -> None:
    grid, participants = met(
        {"site": "s1a"}, {"site": "s2a", **change}, {"site": "s3a"}, at_first=1
    )
    after, (reason,) = meet_latecomers(grid, participants)
    assert re.fullmatch(said, reason)
    assert after.sites() == ["s1a", "s3a"]
    assert meet_latecomers(grid, after) == (after, [])


class GrowingGrid(InlineGrid):
    """A grid whose third node connects once the first round has begun."""

    late: ClassVar[int] = 1003
    sent: ClassVar[list[Message]] = []

    def get_node_ids(self) -> Iterable[int]:
        begun = any(message.metadata.message_type == "train" for message in self.sent)
        return [node for node in super().get_node_ids() if begun or node != self.late]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = list(messages)
        type(self).sent += pushed
        return super().push_messages(pushed)


Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]


@pytest.fixture
def late_run(
    inline_run: InlineRun, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., RunDirectory]:
    """Return a function that runs three rounds of a method, of which the third site joins two."""

    def run(
        method: str,
        grid: type[GrowingGrid] = GrowingGrid,
        out: Path = tmp_path,
        draw: bool = False,
        **changes: Value,
    ) -> RunDirectory:
        grid.sent = []
        values = tiny(method, rounds=3, **changes)
        with monkeypatch.context() as patch:
            patch.setattr(fedsilo.engines.inline_engine, "InlineGrid", grid)
            return inline_run(values, out=out, draw=draw)

    return run


def to_late(round_: int) -> list[Message]:
    return [
        message
        for message in GrowingGrid.sent
        if message.metadata.dst_node_id == GrowingGrid.late
        and message.metadata.message_type == "train"
        and message.content[CONFIG]["round"] == round_
    ]


def map_sites(message: Message) -> set[str]:
    if ARRAYS not in message.content.array_records:
        return set()
    return {name.split("/")[1] for name in message.content[ARRAYS]}


def test_a_latecomer_gets_the_others_maps_at_once_and_they_get_its_own_next(
    late_run: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = late_run("fedevprompt", draw=True)
    said = capsys.readouterr().out
    assert "2 of 3 silos take part: s1a, s2a; no SuperNode for s3a" in said
    assert said.count("joined") == 1
    assert "round 2: s3a joined" in said
    assert to_late(1) == []
    (second,), (third,) = to_late(2), to_late(3)
    assert map_sites(second) == map_sites(third) == {"s1a", "s2a"}
    others = [
        (message.content[CONFIG]["round"], map_sites(message))
        for message in GrowingGrid.sent
        if message.metadata.dst_node_id == 1001 and message.metadata.message_type == "train"
    ]
    assert others == [(1, set()), (2, {"s2a"}), (3, {"s2a", "s3a"})]
    assert list(directory.read_json("buffer.json")["sites"]) == ["s1a", "s2a", "s3a"]
    assert (directory.path / "sites" / "s3a").is_dir()
    assert (directory.path / "distribution.png").is_file()


def test_the_run_directory_names_a_latecomer_everywhere(
    late_run: Callable[..., RunDirectory],
) -> None:
    directory = late_run("fedevprompt")
    silos = directory.read_json("silos.json")
    assert list(silos) == ["s1a", "s2a", "s3a"]
    assert silos["s3a"]["sizes"] == {"train": 36, "val": 4, "test": 10}
    rows = directory.read_csv("traffic.csv")
    traffic = [(row["round"], row["phase"], row["site"]) for row in rows]
    hellos = [row for row in traffic if row[1] == "hello"]
    assert hellos == [("0", "hello", "s1a"), ("0", "hello", "s2a"), ("1", "hello", "s3a")]
    trained = [row[0] for row in traffic if row[1:] == ("train", "s3a")]
    assert trained == ["2", "3"]
    summary = directory.read_json("summary.json")
    assert list(summary["sites"]) == ["s1a", "s2a", "s3a"]
    assert {"D1", "D2", "D3"} <= summary["distributions"].keys()
    mean = np.mean([site["accuracy"] for site in summary["sites"].values()])
    assert summary["mean"]["accuracy"] == pytest.approx(mean)
    assert summary["failures"] == []
    rounds = {row["round"] for row in directory.read_csv("metrics.csv") if row["site"] == "s3a"}
    assert rounds == {"1", "2", "3"}, "its measurements of what came describe the round before"


def test_a_method_without_late_join_does_not_ask_a_latecomer(
    late_run: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = late_run("fedavg")
    assert {message.metadata.dst_node_id for message in GrowingGrid.sent} == {1001, 1002}
    assert list(directory.read_json("silos.json")) == ["s1a", "s2a"]
    assert list(directory.read_json("summary.json")["sites"]) == ["s1a", "s2a"]
    assert "joined" not in capsys.readouterr().out


class RefusedGrid(GrowingGrid):
    """A grid whose latecomer says that it is a site which is there."""

    def __init__(
        self, app: ClientApp, config: Mapping[str, Value], nodes: Any, together: int = 1
    ) -> None:
        late = {"partition-id": 0, "num-partitions": 3}
        super().__init__(app, config, [*list(nodes)[:2], late], together)


def test_a_refused_latecomer_is_told_of_once_and_the_run_goes_on_without_it(
    late_run: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = late_run("fedevprompt", RefusedGrid)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("another SuperNode is already that site") == 1
    assert "joined" not in said
    (failure,) = directory.read_json("summary.json")["failures"]
    assert (failure["round"], failure["phase"]) == (2, "hello")
    assert failure["reason"].startswith("s1a: another SuperNode")
    assert list(directory.read_json("silos.json")) == ["s1a", "s2a"]
    train = [m for m in RefusedGrid.sent if m.metadata.message_type == "train"]
    assert {message.metadata.dst_node_id for message in train} == {1001, 1002}


class DyingGrid(GrowingGrid):
    """A growing grid that takes the process down after ``lives`` answered messages."""

    lives: ClassVar[int] = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if type(self).lives == 0:
            raise KeyboardInterrupt
        type(self).lives -= 1
        return super().pull_messages(message_ids)


def files(directory: RunDirectory) -> dict[str, bytes]:
    wanted = [directory.path / "metrics.csv", *sorted(directory.path.glob("sites/*/*"))]
    return {str(path.relative_to(directory.path)): path.read_bytes() for path in wanted}


# Two hellos, round 1 of two messages, the latecomer's hello, and rounds 2 and 3 of three
@pytest.mark.parametrize("lives", in_soak([6, 8, 10, 12], but=[8]))
def test_a_run_with_a_latecomer_resumes_to_the_same_bytes(
    lives: int,
    late_run: Callable[..., RunDirectory],
    inline_run: InlineRun,
    tiny: Tiny,
    tmp_path: Path,
) -> None:
    whole = late_run("fedevprompt", out=tmp_path / "whole")
    DyingGrid.lives = lives
    with pytest.raises(KeyboardInterrupt):
        late_run("fedevprompt", DyingGrid, out=tmp_path / "cut")
    resumed = inline_run(tiny("fedevprompt", rounds=3, resume=True), out=tmp_path / "cut")
    assert files(resumed) == files(whole)
    assert resumed.read_json("silos.json") == whole.read_json("silos.json")
    arrays, _ = load_state(resumed.path / "model.safetensors")
    same, _ = load_state(whole.path / "model.safetensors")
    assert {name.split("/")[1] for name in arrays} == {"s1a", "s2a", "s3a"}
    assert all(np.array_equal(arrays[name], same[name]) for name in same)


def test_a_run_resumes_with_a_site_that_connected_while_the_server_was_down(
    late_run: Callable[..., RunDirectory], inline_run: InlineRun, tiny: Tiny, tmp_path: Path
) -> None:
    DyingGrid.lives = 4  # two hellos and round 1 of two sites: the third has not been seen yet
    with pytest.raises(KeyboardInterrupt):
        late_run("fedevprompt", DyingGrid, out=tmp_path / "cut")
    assert list(RunDirectory(tmp_path / "cut" / "run").read_json("silos.json")) == ["s1a", "s2a"]
    resumed = inline_run(tiny("fedevprompt", rounds=3, resume=True), out=tmp_path / "cut")
    assert list(resumed.read_json("summary.json")["sites"]) == ["s1a", "s2a", "s3a"]
    assert list(resumed.read_json("silos.json")) == ["s1a", "s2a", "s3a"]
