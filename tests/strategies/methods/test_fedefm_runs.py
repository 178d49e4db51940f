"""Whole runs of FedEFM: who is sent what, its bytes, and a silo that dies between the phases."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from torch import Tensor

import fedsilo.server_app.run.inline_engine
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.fedefm import FedEFMSite
from fedsilo.datasets.io.state_files import load_state
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import ARRAYS, CONFIG
from fedsilo.models.contract.settings_schema import Value
from fedsilo.models.methods.fedefm import EXPERT, VISITOR
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.inline_engine import InlineGrid

Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]


class _Spy(InlineGrid):
    """Keeps every message."""

    seen: list[tuple[str, int, list[str]]]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        for message in sent:
            config = message.content.config_records[CONFIG]
            arrays = message.content.array_records
            names = sorted(arrays[ARRAYS]) if ARRAYS in arrays else []
            phase, node = str(config.get("phase", "hello")), message.metadata.dst_node_id
            type(self).seen.append((phase, node, names))
        return super().push_messages(sent)


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> type[_Spy]:
    monkeypatch.setattr(fedsilo.server_app.run.inline_engine, "InlineGrid", _Spy)
    _Spy.seen = []
    return _Spy


def test_models_travel_as_the_ring_says_and_nothing_else_does(
    tiny: Tiny, inline_run: InlineRun, spied: type[_Spy]
) -> None:
    directory = inline_run(tiny("fedefm", topology="ring"))
    nodes = sorted({node for _, node, _ in spied.seen})
    sites = dict(zip(nodes, ["s1a", "s2a", "s3a"], strict=True))
    before = {"s1a": "s3a", "s2a": "s1a", "s3a": "s2a"}
    overseas = [(sites[n], names) for phase, n, names in spied.seen if phase == "overseas"]
    assert [site for site, _ in overseas] == ["s1a", "s2a", "s3a"]
    after = {there: here for here, there in before.items()}
    for site, names in overseas:  # a silo hosts the one that it is the predecessor of
        assert {name.split("/")[1] for name in names} == {after[site]}
        assert all(name.startswith(VISITOR) for name in names)
    for phase, node, names in spied.seen:
        if phase == "distil":
            experts = [name for name in names if name.startswith(EXPERT)]
            assert {name.split("/")[1] for name in experts} == {before[sites[node]]}
            assert all(name.startswith((EXPERT, "model/")) for name in names)
    document = directory.read_json("closeness.json")
    assert sorted(document) == ["s1a<-s3a", "s2a<-s1a", "s3a<-s2a"]
    assert all(0 <= weight <= 1 for line in document.values() for weight in line.values())


@pytest.mark.parametrize(("topology", "neighbours"), [("ring", 1), ("complete", 2)])
def test_overseas_takes_two_models_a_neighbour_more_and_the_relay_a_third(
    topology: str, neighbours: int, tiny: Tiny, inline_run: InlineRun
) -> None:
    rows = inline_run(tiny("fedefm", topology=topology)).read_csv("traffic.csv")
    sent: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row["site"] == "s1a" and row["round"] in ("1", "2"):
            sent[row["phase"]] = (int(row["bytes_down"]), int(row["bytes_up"]))
    model = sent["train"][1]  # FedAvg's one model up; down another
    both = sum(sent["overseas"])
    assert both == pytest.approx(2 * neighbours * model, rel=0.05)
    assert sent["distil"][0] == pytest.approx((1 + neighbours) * model, rel=0.05)
    assert sent["distil"][1] == pytest.approx(model, rel=0.05)


def _distilled(facts: Mapping[str, Any], round_: str) -> set[str]:
    """Return the silos that a checkpoint has the closeness of a round of."""
    return {edge.partition("<-")[0] for edge in facts["extras"]["closeness"][round_]}


def test_a_silo_that_dies_between_the_phases_is_left_out_of_the_mean_and_the_run_resumes(
    tiny: Tiny,
    inline_run: InlineRun,
    spied: type[_Spy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = tiny("fedefm", rounds=3, min_sites=2)
    start = FedEFMSite._start

    def dying(site: FedEFMSite, lab: Lab) -> dict[str, Tensor]:
        now = lab.instruction
        if (lab.site, now.phase, now.round) == ("s2a", "distil", 2):
            raise SiteError("site s2a has died")
        return start(site, lab)

    monkeypatch.setattr(FedEFMSite, "_start", dying)
    whole = inline_run(values, out=tmp_path / "whole")
    arrays, facts = load_state(whole.path / "checkpoints" / "round-000002.safetensors")
    assert _distilled(facts, "2") == {"s1a", "s3a"}
    name = next(n for n in sorted(arrays) if n.startswith("model/"))
    own = [arrays[name.replace("model/", f"silo/{site}/")] for site in ("s1a", "s3a")]
    assert arrays[name] == pytest.approx((own[0] + own[1]) / 2, abs=1e-6)
    assert not any(n.startswith("back/") for n in arrays)
    _, facts = load_state(whole.path / "checkpoints" / "round-000003.safetensors")
    assert _distilled(facts, "3") == {"s1a", "s2a", "s3a"}, "it is back in the next round"

    class Dying(_Spy):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            if [phase for phase, _, _ in _Spy.seen].count("overseas") > 3:
                raise KeyboardInterrupt  # in round 3
            return super().pull_messages(message_ids)

    spied.seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedsilo.server_app.run.inline_engine, "InlineGrid", Dying)
        with pytest.raises(KeyboardInterrupt):
            inline_run(values, out=tmp_path / "cut")
    cut = inline_run({**values, "resume": True}, out=tmp_path / "cut")
    for file in ("metrics.csv", "model.safetensors"):
        assert (cut.path / file).read_bytes() == (whole.path / file).read_bytes()


def test_by_average_models_go_to_their_hosts_and_no_expert_comes_home(
    tiny: Tiny, inline_run: InlineRun, spied: type[_Spy]
) -> None:
    directory = inline_run(tiny("fedefm", topology="complete", visit="average"))
    assert {phase for phase, _, _ in spied.seen} == {"hello", "train", "evaluate"}
    received = [names for phase, _, names in spied.seen if phase == "train"][-1]
    assert {name.split("/")[1] for name in received if name.startswith("neighbour/")} == {
        "s1a",
        "s2a",
    }
    assert directory.read_json("summary.json")["mean"]["accuracy"] > 0
