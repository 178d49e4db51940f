import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.client_app.explain.sample import explain_sample
from fedsilo.datasets.io.state_files import load_state
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.contract.own_settings import NoSettings
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.distrans import OFFSET, DisTransSettings, build_embedding
from fedsilo.server_app.studies.finished_run import FinishedRun
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.distrans import DisTrans
from fedsilo.strategies.methods.fedavg import FedAvg
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, state_after

Tiny = Callable[..., dict[str, Any]]
Run = Callable[..., tuple[Any, RoundLoop]]
COMMON = CommonSettings(silos=3, width=2)
SITES = ("s1a", "s2a", "s3a")


@pytest.fixture
def opened(participants: Participants) -> Callable[..., DisTrans]:
    """Return a builder of the method: how offsets are aggregated, the common settings."""
    counts = {"s1a": [36, 0], "s2a": [12, 24], "s3a": [18, 18]}
    facts = {
        site: dataclasses.replace(
            found, label_counts=found.label_counts | {"train": counts[site]}, classes=2
        )
        for site, found in participants.facts.items()
    }
    sites = dataclasses.replace(participants, facts=facts)

    def make(aggregation: str = "mean", common: CommonSettings = COMMON) -> DisTrans:
        return DisTrans(common, DisTransSettings(offset_aggregation=aggregation), sites)

    return make


def test_the_network_starts_as_fedavgs_its_last_layer_reading_the_mean_of_both_channels(
    opened: Callable[..., DisTrans],
) -> None:
    method = opened()
    start = method.initial_state().arrays
    fedavg = FedAvg(COMMON, NoSettings(), method.participants).initial_state().arrays
    last = fedavg["head.4.weight"] / 2
    np.testing.assert_array_equal(start["head.logits.weight"], np.concatenate([last, last], axis=1))
    renamed = {n.replace("head.logits", "head.4").replace("head.dense", "head"): n for n in start}
    assert set(renamed) == set(fedavg) | {OFFSET}
    for name in fedavg.keys() - {"head.4.weight"}:
        np.testing.assert_array_equal(start[renamed[name]], fedavg[name])
    assert start[OFFSET].shape == (256, 1)


def test_networks_and_offsets_are_averaged_by_samples(
    opened: Callable[..., DisTrans], site_reply: Callable[..., Any]
) -> None:
    before = State({"w": np.float32([0]), OFFSET: np.zeros((2, 1), np.float32)}, 1)
    replies = {
        "s1a": site_reply("s1a", {"w": [1.0], OFFSET: [[2.0], [0.0]]}, num_examples=1),
        "s2a": site_reply("s2a", {"w": [5.0], OFFSET: [[6.0], [4.0]]}, num_examples=3),
    }
    after = state_after(opened(), before, replies)
    assert after.arrays["w"].tolist() == [4.0]
    assert after.arrays[OFFSET].tolist() == [[5.0], [3.0]]
    assert set(evaluation_of(opened(), after).send["s3a"]) == {"w", OFFSET}


def test_an_offset_that_stays_is_neither_sent_nor_expected(
    opened: Callable[..., DisTrans],
) -> None:
    method = opened("none")
    state = method.initial_state()
    for names in (arrays_sent(method, state)["s1a"], arrays_expected(method, state)["s1a"]):
        assert set(names) == set(state.arrays)
        assert OFFSET not in names


def test_an_embedding_makes_each_site_its_offset_from_its_class_shares(
    opened: Callable[..., DisTrans], site_reply: Callable[..., Any]
) -> None:
    method = opened("embedding")
    state = method.initial_state()
    embedding = build_embedding(COMMON.seed, 2, 256)
    shares = {"s1a": [1.0, 0.0], "s2a": [1 / 3, 2 / 3], "s3a": [0.5, 0.5]}
    for site, share in shares.items():
        sent = arrays_sent(method, state)[site]
        made = embedding(torch.tensor(share).double()).detach().float().numpy()
        np.testing.assert_allclose(sent[OFFSET], made, atol=1e-6)
        assert not [name for name in sent if name.startswith(("embedding/", "offset/"))]
        assert arrays_expected(method, state)[site][OFFSET].shape == (256, 1)
    trained = {
        site: {n: np.array(a) for n, a in arrays_sent(method, state)[site].items()}
        for site in ("s3a", "s1a")
    }
    for site, arrays in trained.items():
        arrays[OFFSET] = np.full((256, 1), 0.5 if site == "s1a" else -0.5, np.float32)
    replies = {site: site_reply(site, arrays) for site, arrays in trained.items()}
    after = state_after(method, state, replies)
    for site in ("s1a", "s3a"):  # a step each, in the order of names
        wanted = torch.from_numpy(trained[site][OFFSET]).double()
        embedding.fit(torch.tensor(shares[site]).double(), wanted, 0.01)
    for site in SITES:
        made = embedding(torch.tensor(shares[site]).double()).detach().numpy()
        found = after.arrays[f"offset/{site}"]
        np.testing.assert_allclose(found, made, atol=1e-6)
        assert (found != state.arrays[f"offset/{site}"]).any()
    model = method.model(after)
    assert {f"offset/{site}" for site in SITES} < set(model)
    assert not [name for name in model if name.startswith("embedding/")]


def test_of_raw_pixels_the_embedding_makes_offsets_from_0_to_255(
    opened: Callable[..., DisTrans],
) -> None:
    plain, raw = (
        opened("embedding", dataclasses.replace(COMMON, pixel_scale=scale))
        for scale in ("standard", "raw")
    )
    expected = 127.5 * (plain.initial_state().arrays["offset/s1a"] + 1)
    found = raw.initial_state().arrays["offset/s1a"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("aggregation", "leaves"), [("mean", 2), ("embedding", 2), ("none", 1)])
def test_it_tells_what_an_offset_is_where_one_leaves(
    opened: Callable[..., DisTrans], aggregation: str, leaves: int
) -> None:
    told = opened(aggregation).disclosures().leaves
    assert len(told) == leaves
    assert "all weights" in told[0]
    assert leaves == 1 or "as large as an image" in told[1]


@pytest.mark.parametrize("aggregation", ["mean", "embedding", "none"])
def test_what_crosses_the_wire_in_a_run_is_what_was_said(
    spied_run: Run, tiny: Tiny, recorder: Any, aggregation: str
) -> None:
    grid, _ = spied_run(tiny("distrans", offset_aggregation=aggregation), [recorder])
    for message in [*grid.sent[3:], *grid.replies[3:]]:
        names = set(message.content.array_records.get(ARRAYS, {}))
        assert (OFFSET in names) == (aggregation != "none" and bool(names))
        assert not [name for name in names if name.startswith(("embedding/", "offset/"))]
    sent = [message.content[ARRAYS].get(OFFSET) for message in grid.sent[6:9]]
    if aggregation != "none":
        kinds = {array.numpy().tobytes() for array in sent}
        assert len(kinds) == (1 if aggregation == "mean" else 3)
    kept = ("s1a", "s2a", "s3a") if aggregation == "none" else ()
    assert recorder.states[0].stateful_sites == kept


@pytest.mark.parametrize("aggregation", ["mean", "embedding", "none"])
def test_a_finished_run_is_opened_with_the_sites_offset(
    inline_run: Callable[..., Any], tiny: Tiny, aggregation: str
) -> None:
    values = tiny("distrans", offset_aggregation=aggregation, offset_learning_rate=0.5)
    directory = inline_run(values)
    arrays, _ = load_state(directory.path / "model.safetensors")
    site: Any = FinishedRun.open(directory.path).lab("s2a")
    found = site.open().offset.weight.detach().numpy()
    held = {"mean": arrays.get(OFFSET), "embedding": arrays.get("offset/s2a")}
    if aggregation == "none":
        held["none"] = site.state()[OFFSET].numpy()
        assert not [name for name in arrays if "offset" in name]
    np.testing.assert_array_equal(found, held[aggregation])
    assert explain_sample(site, "test", 0).lines()


def test_a_table_is_refused_in_a_line_that_says_what_to_do(
    inline_run: Callable[..., Any],
) -> None:
    values = {"method": "distrans", "dataset": "heart-synthetic", "rounds": 1, "device": "cpu"}
    with pytest.raises(SettingError) as error:
        inline_run(values)
    said = str(error.value)
    assert "'distrans' is of images, and data set 'heart-synthetic' is a table: choose" in said
    assert "\n" not in said
