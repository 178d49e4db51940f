"""Whole runs of FedEvPrompt: every message looked at, sites that fail, and a new process."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict

import fedsilo.client_app.opening
import fedsilo.server_app.run.inline_engine
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.site.private_state import SiteState, settings_digest_of
from fedsilo.datasets.io.state_files import load_state
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import ARRAYS, EVALUATE, HELLO, Instruction
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.fedevprompt import FedEvPromptSettings
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.site_network import SiteNetwork, exchanged_arrays
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.inline_engine import InlineGrid
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedevprompt import FedEvPrompt
from fedsilo.strategies.wire.records import record_bytes
from tests.support.asking import arrays_expected

ALL = ["s1a", "s2a", "s3a"]
NODES = {1001: "s1a", 1002: "s2a", 1003: "s3a"}
OWN = ["head.1.bias", "head.1.weight", "prompts.b", "prompts.t"]
CELLS = 16
Behaviour = Callable[[Message], RecordDict]
Run = Callable[..., tuple[Any, FedEvPrompt]]
InlineRun = Callable[..., RunDirectory]
Tiny = Callable[..., dict[str, Any]]


def arrays_of(message: Message) -> dict[str, Any]:
    record = message.content.array_records.get(ARRAYS, {})
    return {name: array.numpy() for name, array in record.items()}


def by_round(messages: list[Message], of_reply: bool = False) -> list[dict[str, dict[str, Any]]]:
    """Return, for each phase after the hellos, every site's arrays."""
    found: list[dict[str, dict[str, Any]]] = []
    for at, message in enumerate(m for m in messages if m.metadata.message_type != HELLO):
        if at % 3 == 0:
            found.append({})
        told = message.metadata
        found[-1][NODES[told.src_node_id if of_reply else told.dst_node_id]] = arrays_of(message)
    return found


def held(tiny: Tiny, site: str) -> list[int]:
    """Return how many training samples of each class a site has."""
    silo = load_silo(site, resolve(tiny("fedevprompt")).common)
    return torch.bincount(silo.train.labels, minlength=10).tolist()


def test_replies_hold_maps_alone_and_no_site_is_sent_its_own(spied_run: Run, tiny: Tiny) -> None:
    grid, strategy = spied_run(tiny("fedevprompt", rounds=3))
    sent, replies = by_round(grid.sent), by_round(grid.replies, of_reply=True)
    assert len(sent) == len(replies) == 4  # the last is the evaluation
    counts = {site: held(tiny, site) for site in ALL}
    for answers in replies[:3]:
        for site, arrays in answers.items():
            assert {name: array.shape for name, array in arrays.items()} == {
                f"maps/{label}": (min(2, count), CELLS)
                for label, count in enumerate(counts[site])
                if count
            }
            for array in arrays.values():
                assert array.dtype == np.float32
                np.testing.assert_allclose(array.sum(axis=1), 1, atol=1e-5)
    for before, received in zip(replies[:2], sent[1:3], strict=True):
        for site, arrays in received.items():  # what the others sent in the round before, untouched
            expected = {
                name.replace("maps/", f"maps/{other}/"): array
                for other in ALL
                if other != site
                for name, array in before[other].items()
            }
            assert set(arrays) == set(expected)
            assert not any(name.startswith(f"maps/{site}/") for name in arrays)
            for name, array in arrays.items():
                np.testing.assert_array_equal(array, expected[name])
    for empty in (sent[0], sent[3], replies[3]):
        assert empty == {site: {} for site in ALL}
    assert set(strategy.state.arrays) == {
        name.replace("maps/", f"buffer/{site}/")
        for site, arrays in replies[2].items()
        for name in arrays
    }


def test_maps_change_from_round_to_round(spied_run: Run, tiny: Tiny) -> None:
    grid, _ = spied_run(tiny("fedevprompt", rounds=3, learning_rate=0.05))
    first, second = by_round(grid.replies, of_reply=True)[:2]
    for site in ALL:
        assert not all(np.array_equal(a, second[site][name]) for name, a in first[site].items())


def test_no_array_of_the_network_is_in_any_message_and_maps_are_all_that_weighs(
    spied_run: Run, tiny: Tiny
) -> None:
    grid, _ = spied_run(tiny("fedevprompt", rounds=3))
    messages = [m for m in grid.sent + grid.replies if m.metadata.message_type != HELLO]
    assert len(messages) == 24
    for message in messages:
        assert set(message.content.array_records) <= {ARRAYS}
        for name, array in arrays_of(message).items():
            assert name.split("/")[0] == "maps"
            assert array.shape[1:] == (CELLS,)
            assert len(array) <= 2
    others = {site: sum(min(2, n) for o in ALL if o != site for n in held(tiny, o)) for site in ALL}
    for message in grid.sent[6:9]:  # the second round's
        site, arrays = NODES[message.metadata.dst_node_id], arrays_of(message)
        numbers = sum(array.nbytes for array in arrays.values())
        assert numbers == 4 * CELLS * others[site]
        assert record_bytes(message.content) < numbers + 250 * (len(arrays) + 5)
    for message in grid.replies[3:6]:
        site = NODES[message.metadata.src_node_id]
        numbers = sum(array.nbytes for array in arrays_of(message).values())
        assert numbers == 4 * CELLS * sum(min(2, n) for n in held(tiny, site))


@pytest.mark.parametrize(("shared", "names"), [("b", ["prompts.b"]), ("all", OWN)])
def test_what_is_averaged_travels_by_its_name_beside_the_maps(
    spied_run: Run, tiny: Tiny, shared: str, names: list[str]
) -> None:
    grid, _ = spied_run(tiny("fedevprompt", shared_prompts=shared))
    sent, replies = by_round(grid.sent), by_round(grid.replies, of_reply=True)
    for messages in (sent, replies[:2]):
        for arrays in (a for one in messages for a in one.values()):
            assert sorted(n for n in arrays if not n.startswith("maps/")) == names
    for name in names:
        mean = np.mean([replies[0][site][name] for site in ALL], axis=0, dtype=np.float64)
        for site in ALL:
            np.testing.assert_allclose(sent[1][site][name], mean, atol=1e-6)
    assert all(set(arrays) == set(names) for arrays in sent[2].values())
    assert not any(f"maps/{site}/" in name for site in ALL for name in sent[1][site])


def test_without_distillation_nothing_travels(spied_run: Run, tiny: Tiny) -> None:
    grid, _ = spied_run(tiny("fedevprompt", distillation_weight=0.0))
    for message in grid.sent + grid.replies:
        assert ARRAYS not in message.content.array_records


def test_sharing_all_without_distillation_is_fedavg_to_the_byte(
    inline_run: InlineRun, tiny: Tiny, tmp_path: Path
) -> None:
    ours = tiny("fedevprompt", rounds=3, shared_prompts="all", distillation_weight=0.0)
    common = {k: v for k, v in ours.items() if not k.startswith("fedevprompt.")}
    theirs = common | {"method": "fedavg"}
    first = inline_run({**ours, "optimiser": "adamw"}, out=tmp_path / "ours")
    second = inline_run({**theirs, "optimiser": "adamw"}, out=tmp_path / "theirs")
    bytes_ = [(run.path / "metrics.csv").read_bytes() for run in (first, second)]
    assert bytes_[0] == bytes_[1]
    assert bytes_[0].count(b"\n") > 50
    models = [load_state(run.path / "model.safetensors")[0] for run in (first, second)]
    assert sorted(models[0]) == sorted(models[1]) == OWN
    for name in OWN:
        assert models[0][name].tobytes() == models[1][name].tobytes()


@dataclasses.dataclass
class Watched:
    """What every site trained from and to, by site and round."""

    before: dict[tuple[str, int], dict[str, Any]] = dataclasses.field(default_factory=dict)
    after: dict[tuple[str, int], dict[str, Any]] = dataclasses.field(default_factory=dict)


@pytest.fixture
def fails_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    """Return a function that lets a site fail to train in some rounds, and watches all others."""

    def arrange(site: str, *rounds: int) -> Watched:
        usual, seen = Lab.fit, Watched()

        def fit(lab: Lab, network: SiteNetwork, **options: Any) -> None:
            key = (lab.site, lab.instruction.round)
            if lab.site == site and key[1] in rounds:
                raise SiteError("the disk is full")
            vit = cast(PromptedViT, network)
            seen.before[key] = {n: a.numpy().copy() for n, a in exchanged_arrays(vit).items()}
            usual(lab, network, **options)
            seen.after[key] = {n: a.numpy().copy() for n, a in exchanged_arrays(vit).items()}

        monkeypatch.setattr(Lab, "fit", fit)
        return seen

    return arrange


def test_a_site_that_fails_has_no_map_in_the_next_round_and_comes_back_with_its_own_state(
    spied_run: Run, tiny: Tiny, fails_in: Any, recorder: Any
) -> None:
    seen = fails_in("s2a", 2)
    grid, _ = spied_run(tiny("fedevprompt", rounds=4, min_sites=2), [recorder])
    assert recorder.failures == [(2, "train", "s2a", "the disk is full")]
    sent = by_round(grid.sent)
    senders = [
        {site: {name.split("/")[1] for name in arrays} for site, arrays in one.items()}
        for one in sent
    ]
    whole = {site: set(ALL) - {site} for site in ALL}
    nobody: dict[str, set[str]] = {site: set() for site in ALL}
    assert senders == [
        nobody,
        whole,
        {"s1a": {"s3a"}, "s2a": {"s1a", "s3a"}, "s3a": {"s1a"}},
        whole,
        nobody,
    ]
    for name in OWN:  # it goes on from its first round, the others from their second
        np.testing.assert_array_equal(seen.before["s2a", 3][name], seen.after["s2a", 1][name])
        np.testing.assert_array_equal(seen.before["s1a", 3][name], seen.after["s1a", 2][name])
        assert not np.array_equal(seen.before["s2a", 3][name], seen.before["s1a", 3][name])


def test_a_site_that_fails_from_the_first_round_begins_later_from_the_seed(
    spied_run: Run, tiny: Tiny, fails_in: Any, recorder: Any
) -> None:
    seen = fails_in("s3a", 1)
    spied_run(tiny("fedevprompt", min_sites=2), [recorder])
    assert [failure[:3] for failure in recorder.failures] == [(1, "train", "s3a")]
    for name in OWN:
        np.testing.assert_array_equal(seen.before["s3a", 2][name], seen.before["s1a", 1][name])


def test_without_min_sites_a_site_that_fails_stops_the_run(
    spied_run: Run, tiny: Tiny, fails_in: Any
) -> None:
    fails_in("s2a", 2)
    with pytest.raises(SiteError, match="site s2a, round 2, phase train: the disk is full"):
        spied_run(tiny("fedevprompt"))


def test_a_site_without_a_class_sends_no_map_of_it_and_is_asked_for_none(
    spied_run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, settings: CommonSettings) -> Silo:
        silo = load_silo(name, settings)
        if name != "s2a":
            return silo
        kept = silo.train.labels != 3
        train = Split(silo.train.inputs[kept], silo.train.labels[kept])
        return dataclasses.replace(silo, train=train)

    assert all(held(tiny, site)[3] for site in ALL)
    monkeypatch.setattr(fedsilo.client_app.opening, "load_silo", load)
    grid, strategy = spied_run(tiny("fedevprompt", distillation_weight=1.0))
    replies, sent = by_round(grid.replies, of_reply=True), by_round(grid.sent)
    expected = arrays_expected(strategy.method, strategy.state, "train")["s2a"]
    assert "maps/3" not in expected
    assert "maps/3" in arrays_expected(strategy.method, strategy.state, "train")["s1a"]
    for answers in replies[:2]:
        assert set(answers["s2a"]) == set(expected)
        assert "maps/3" in answers["s1a"]
    assert "maps/s2a/3" not in sent[1]["s1a"]
    assert {"maps/s1a/3", "maps/s3a/3"} <= set(sent[1]["s2a"])


class _DyingGrid(InlineGrid):
    """A grid that takes the process down, as it were, after ``lives`` answered messages."""

    lives = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if type(self).lives == 0:
            raise KeyboardInterrupt
        type(self).lives -= 1
        return super().pull_messages(message_ids)


_GOES_ON = """
import json, sys
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.run.inline_engine import run_inline
from tests.support.asking import arrays_expected
run_inline(resolve(json.loads(sys.argv[1])), 3)
"""


@pytest.mark.soak  # resumed runs open the same files, in test_end_to_end
def test_a_new_process_goes_on_from_the_sites_own_prompts_and_moments(
    inline_run: InlineRun, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny("fedevprompt", optimiser="adamw", weight_decay=0.01)
    values |= {"optimiser-state": "run"}
    whole = inline_run(values, out=tmp_path / "whole").path
    with monkeypatch.context() as patch:
        patch.setattr(fedsilo.server_app.run.inline_engine, "InlineGrid", _DyingGrid)
        _DyingGrid.lives = 6  # the hellos and the first round
        with pytest.raises(KeyboardInterrupt):
            inline_run(values, out=tmp_path / "cut")
    cut = tmp_path / "cut" / "run"
    assert {path.name for path in cut.glob("sites/*/*")} == {"round-000001-00.safetensors"}
    told = json.dumps({**values, "run-name": "run", "out": str(tmp_path / "cut"), "resume": True})
    command = [sys.executable, "-c", _GOES_ON, told]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    files = ["metrics.csv", "buffer.json"]
    files += [f"sites/{site}/round-{r:06d}-00.safetensors" for site in ALL for r in (1, 2)]
    for name in files:
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    for site in ALL:
        steps = [
            load_state(cut / f"sites/{site}/round-{r:06d}-00.safetensors")[0][
                "pace/optimiser/prompts.b/step"
            ].item()
            for r in (1, 2)
        ]
        assert steps == [3, 6]  # 36 samples in batches of 16


def test_a_private_state_that_is_cut_short_stops_the_run_with_the_sites_name(
    inline_run: InlineRun, tiny: Tiny
) -> None:
    run = inline_run(tiny("fedevprompt"))
    (run.path / "summary.json").unlink()
    path = run.path / "sites/s2a/round-000002-00.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SiteError, match=r"private state of site s2a: .* truncated"):
        inline_run({**tiny("fedevprompt"), "resume": True})


@pytest.fixture
def started(
    spy_grid: Any,
    fake_app: Any,
    participants: Participants,
    recorder: Any,
    good: Callable[..., Behaviour],
    tiny: Tiny,
) -> Run:
    """Return a function that runs two rounds over fake sites of two classes."""

    def start(min_sites: int = 0, **special: Behaviour) -> tuple[Any, FedEvPrompt]:
        common = resolve({**tiny("fedevprompt"), "run-name": "run"}).common
        counts = {"train": [30, 6], "val": [4, 0], "test": [5, 5]}
        facts = {
            site: dataclasses.replace(found, label_counts=counts, classes=2)
            for site, found in participants.facts.items()
        }
        method = FedEvPrompt(
            dataclasses.replace(common, min_sites=min_sites),
            FedEvPromptSettings(buffer_maps=2),
            Participants(facts, participants.nodes, asked=frozenset(participants.nodes.values())),
        )
        strategy = RoundLoop(method, [recorder], "/somewhere")
        strategy.state = method.initial_state()
        grid = spy_grid(fake_app(good(), **special))
        strategy.start(grid, common.rounds, 20)
        return grid, strategy

    return start


@pytest.fixture
def good(content: Any, measured: dict[str, float], told: Any) -> Callable[..., Behaviour]:
    """Return a builder of a good site; ``changes`` to what it sends from round ``since`` on."""

    def build(since: int = 1, **changes: Any) -> Behaviour:
        def answer(message: Message) -> RecordDict:
            if message.metadata.message_type == EVALUATE:
                return content(kept_state=1, **measured)
            maps = {f"maps__{label}": np.eye(CELLS, dtype=np.float32)[:2] for label in (0, 1)}
            given = maps | (changes if told(message)["round"] >= since else {})
            named = {n.replace("__", "/"): a for n, a in given.items() if a is not None}
            return content(named, kept_state=1, **measured)

        return answer

    return build


EYE = np.eye(CELLS, dtype=np.float32)[:2]
BAD_GIFTS: dict[str, dict[str, Any]] = {
    r"array 'maps/1' is float32 \(2, 15\), expected float32 \(2, 16\)": {"maps__1": EYE[:, :15]},
    r"array 'maps/1' is float32 \(1, 16\), expected float32 \(2, 16\)": {"maps__1": EYE[:1]},
    r"array 'maps/1' is float64 \(2, 16\), expected": {"maps__1": EYE.astype(np.float64)},
    r"array 'maps/1' contains non-finite values": {"maps__1": EYE * np.float32(np.nan)},
    r"array 'maps/0': a map has a negative value \(-0.5\)": {"maps__0": EYE * 2 - EYE[::-1] / 2},
    r"array 'maps/0': a map sums to 0.5, not to 1": {"maps__0": EYE / 2},
    r"missing \['maps/1'\], surplus \[\]": {"maps__1": None},
    r"missing \[\], surplus \['maps/2'\]": {"maps__2": EYE},
    r"missing \[\], surplus \['prompts.b'\]": {"prompts.b": np.zeros((1, 2, 3, 16), np.float32)},
}


@pytest.mark.parametrize("said", BAD_GIFTS)
def test_a_buffer_entry_that_cannot_be_one_stops_the_run_or_stays_out(
    started: Run, good: Callable[..., Behaviour], recorder: Any, said: str
) -> None:
    bad = good(2, **BAD_GIFTS[said])
    with pytest.raises(SiteError, match=f"site s2a, round 2, phase train: .*{said}"):
        started(s2a=bad)
    recorder.failures.clear()
    _, strategy = started(min_sites=2, s2a=bad)
    assert {name.split("/")[1] for name in strategy.state.arrays} == {"s1a", "s3a"}
    assert [(round_, site) for round_, _, site, _ in recorder.failures] == [(2, "s2a")]


def test_good_maps_enter_the_buffer_of_every_site(started: Run) -> None:
    grid, strategy = started()
    arrays = strategy.state.arrays
    assert set(arrays) == {f"buffer/{site}/{label}" for site in ALL for label in (0, 1)}
    (message,) = [m for m in grid.sent[3:6] if m.metadata.dst_node_id == 1002]
    assert set(arrays_of(message)) == {f"maps/{s}/{c}" for s in ("s1a", "s3a") for c in (0, 1)}


def test_a_site_stores_no_state_of_a_round_that_the_server_loses(
    spied_run: Run, tiny: Tiny, tmp_path: Path
) -> None:
    values = tiny("fedevprompt") | {"optimiser-state": "run"}
    settings = resolve(values)
    spied_run(values)
    promise = settings_digest_of(settings.common, settings.own)
    state = SiteState(tmp_path / "sites" / "s1a", promise)
    asked = Instruction(2, "train", expects_state=True)
    own = state.before(asked)
    assert own is not None
    assert (
        own["pace/optimiser/prompts.t/step"].item() == 3
    )  # of round 1, round 2's is not looked at


def test_the_scale_of_the_maps_changes_what_is_trained_and_not_what_travels(
    tiny: Tiny, inline_run: InlineRun
) -> None:
    strong = {"fedevprompt.distillation-weight": 0.1}
    runs = {
        scale: inline_run(
            tiny("fedevprompt") | strong | {"fedevprompt.map-scale": scale, "run-name": scale}
        )
        for scale in ("sum", "max")
    }
    losses = {
        scale: [
            row["value"]
            for row in run.read_csv("metrics.csv")
            if (row["round"], row["metric"]) == ("2", "trained-loss")
        ]
        for scale, run in runs.items()
    }
    assert losses["sum"]
    assert losses["sum"] != losses["max"]
    sent = [run.read_json("summary.json")["bytes"] for run in runs.values()]
    assert sent[0]["up"] == sent[1]["up"]
