"""Tests of the method 'distrans': equations, site and server."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsilo.client_app.methods.distrans import DisTransSite
from fedsilo.client_app.site.limits import Limits
from fedsilo.core.errors import SettingError
from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import ARRAYS, METRICS
from fedsilo.core.seeding import seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.core.settings_schema import build
from fedsilo.explanations.sample import explain_sample
from fedsilo.models.methods.distrans import (
    OFFSET,
    DisTransSettings,
    DoubleChannelClassifier,
    DoubleHead,
    OffsetEmbedding,
    build_embedding,
    double_channels,
    first_offset,
    from_pixels,
    to_pixels,
    transform_images,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.distrans import DisTrans
from fedsilo.strategies.methods.fedavg import FedAvg
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, state_after
from tests.support.errors import refuses
from tests.support.lab import answer, evaluate, fitted
from tests.support.methods import SITES, Opened, Tiny
from tests.support.setting_keys import as_key

# The equations

DIGITS = NetworkShape((1, 16, 16), 10)


def settings(**values: Any) -> CommonSettings:
    named = {as_key(name): value for name, value in values.items()}
    return build(CommonSettings, {"method": "distrans", "network.width": 2, **named})


def double(
    alpha: float = 0.2, task: NetworkShape = DIGITS, **values: Any
) -> DoubleChannelClassifier:
    common = settings(**values)
    network = build_classifier(common, task)
    doubled = double_channels(network, common, task.input_shape)
    doubled.alpha = alpha
    return doubled


def test_two_pixels_are_moved_to_the_offset_and_from_it() -> None:
    image, offset = torch.tensor([[[[1.0, -1.0]]]]), torch.tensor([[[[0.5, 0.0]]]])
    first, second = transform_images(image, offset, 0.2)
    # 0.8 * 1 + 0.2 * 0.5 and 0.8 * -1; 1.2 * 1 - 0.2 * 0.5 and 1.2 * -1
    torch.testing.assert_close(first, torch.tensor([[[[0.9, -0.8]]]]))
    torch.testing.assert_close(second, torch.tensor([[[[1.1, -1.2]]]]))


def test_the_gradient_of_two_pixels_by_hand() -> None:
    """Of first + 3 second the offset's gradient is alpha (1 - 3), at each pixel of each image."""
    images, offset = torch.rand(4, 1, 1, 2), torch.zeros(1, 1, 2, requires_grad=True)
    first, second = transform_images(images, offset.expand(4, 1, 1, 2), 0.25)
    (first + 3 * second).sum().backward()  # type: ignore[no-untyped-call]
    assert offset.grad is not None
    torch.testing.assert_close(offset.grad, torch.full((1, 1, 2), 4 * 0.25 * -2))


@given(st.integers(0, 1000), st.floats(0.01, 3.0))
def test_the_image_is_the_mean_of_its_channels_and_the_offset_can_be_had_back(
    seed: int, alpha: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    images, offsets = torch.randn(2, 3, 1, 4, 4, generator=draw).double()
    first, second = transform_images(images, offsets, alpha)
    torch.testing.assert_close((first + second) / 2, images)
    torch.testing.assert_close(images - (second - first) / (2 * alpha), offsets)


@pytest.mark.parametrize("kind", ["conv", "resnet22", "vgg16-bn"])
def test_it_starts_as_the_network_of_one_channel_where_the_channels_are_alike(kind: str) -> None:
    shape = (3, 32, 32) if kind == "vgg16-bn" else (1, 16, 16)
    task = NetworkShape(shape, 10)
    single = build_classifier(settings(network=kind), task).eval()
    network = double(1e-12, task, network=kind).eval()
    images = torch.rand(2, *shape)
    assert network.encode(images).shape == (2, 2 * single.tokens, single.channels)
    torch.testing.assert_close(network(images), single(images), atol=1e-5, rtol=1e-4)


def test_the_logits_read_both_channels_beside_one_another() -> None:
    single = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    for layer, weight in ((single[0], 2.0), (single[2], 3.0)):
        nn.init.constant_(cast(nn.Linear, layer).weight, weight)
        nn.init.constant_(cast(nn.Linear, layer).bias, 1.0)
    head = DoubleHead(single)
    features = torch.tensor([[1.0, 2.0], [-1.0, 0.0]])  # dense: 3 and 5; 0 and 1
    torch.testing.assert_close(head(features), torch.tensor([[13.0], [2.5]]))
    with torch.no_grad():
        head.logits.weight.copy_(torch.tensor([[1.0, 10.0]]))
    torch.testing.assert_close(head(features), torch.tensor([[54.0], [11.0]]))


def test_the_network_is_the_transformation_the_encoder_and_the_head_in_turn() -> None:
    network = double(0.3).eval()
    images = torch.rand(3, 1, 16, 16)
    offset = network.offset.weight.detach().reshape(1, 1, 16, 16)
    channels = transform_images(images, offset, 0.3)
    plain = [TokenClassifier.encode(_bare(network), one) for one in channels]
    expected = network.head(torch.cat(plain, dim=1).flatten(1))
    torch.testing.assert_close(network(images), expected)


def _bare(network: DoubleChannelClassifier) -> TokenClassifier:
    return TokenClassifier(network.encoder, network.head, tokens=1, channels=1)


def test_the_offset_is_an_image_that_precision_does_not_round() -> None:
    network = double()
    assert exchanged_arrays(network)["offset.weight"].shape == (256, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = network.both_channels(torch.zeros(1, 1, 16, 16))
    assert found.dtype == torch.float32
    expected = 0.2 * network.offset.weight.reshape(1, 1, 16, 16)
    torch.testing.assert_close(found, torch.cat([expected, -expected]))


def test_the_first_offset_is_the_seeds_and_within_the_pixels_range() -> None:
    standard, raw = settings(seed=3), settings(seed=3, pixel_scale="raw")
    drawn = first_offset(standard, (1, 28, 28))
    assert torch.equal(drawn, first_offset(standard, (1, 28, 28)))
    assert not torch.equal(drawn, first_offset(standard, (1, 28, 28), "s1a"))
    assert not torch.equal(drawn, first_offset(settings(seed=4), (1, 28, 28)))
    assert -1 <= drawn.min() < -0.95
    assert 0.95 < drawn.max() < 1
    of_raw = first_offset(raw, (1, 28, 28))
    torch.testing.assert_close(of_raw, 127.5 * (drawn + 1))
    torch.testing.assert_close(from_pixels(of_raw, raw), drawn, atol=1e-6, rtol=0)
    assert to_pixels(drawn, standard) is from_pixels(drawn, standard) is drawn


def test_building_it_leaves_other_draws_alone() -> None:
    common = settings()
    single = build_classifier(common, DIGITS)
    with seed_generators(3, "elsewhere"):
        expected = torch.rand(2)
    with seed_generators(3, "elsewhere"):
        double_channels(single, common, (1, 16, 16))
        build_embedding(3, 10, 256)
        assert torch.equal(torch.rand(2), expected)


def test_the_embedding_takes_a_step_down_the_squared_distance() -> None:
    embedding, again = build_embedding(7, 2, 4), build_embedding(7, 2, 4)
    shares, wanted = torch.tensor([0.25, 0.75]).double(), torch.full((4, 1), 0.5).double()
    before = {name: p.detach().clone() for name, p in embedding.named_parameters()}

    def distance(one: OffsetEmbedding) -> Tensor:
        return (one(shares) - wanted).square().mean()

    near = distance(embedding)
    gradients = torch.autograd.grad(distance(again), list(again.parameters()))
    embedding.fit(shares, wanted, 0.1)
    for (name, after), gradient in zip(embedding.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(after.detach(), before[name] - 0.1 * gradient)
    assert distance(embedding) < near
    assert embedding(shares).abs().max() < 1


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("distrans.offset-learning-rate", -1.0, "at least 0"),
        ("distrans.offset-aggregation", "median", "mean"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(key: str, value: Any, allowed: str) -> None:
    with refuses(SettingError, key, value, allowed):
        build(DisTransSettings, {key: value})


def test_the_authors_values_hold_unless_they_are_set() -> None:
    assert build(DisTransSettings, {}) == DisTransSettings(1e-3, "mean")


def test_a_plug_whose_head_ends_in_a_linear_layer_is_doubled_and_another_is_refused() -> None:
    body = nn.Conv2d(1, 2, 2)  # of images of 2x2 a map of one place
    common = CommonSettings(network="mine:build")
    ends_linear = TokenClassifier(body, nn.Sequential(nn.Linear(2, 3)), tokens=1, channels=2)
    doubled = double_channels(ends_linear, common, (1, 2, 2))
    assert doubled(torch.zeros(5, 1, 2, 2)).shape == (5, 3)
    for head in (nn.Identity(), nn.Sequential(nn.Linear(2, 3), nn.Tanh())):
        other = TokenClassifier(body, head, tokens=1, channels=2)
        with refuses(SettingError, "mine:build", "network.name"):
            double_channels(other, common, (1, 2, 2))


# At a site

Weights = Callable[..., dict[str, Any]]
ONE_STEP = {"local_steps": 1, "batch_size": 36, "dropout": 0.0, "optimiser": "sgd"}


@pytest.fixture
def received(resolved: Callable[..., Any]) -> Weights:
    """Return a builder of what the server sends at first, by settings."""

    def make(**own: Any) -> dict[str, Any]:
        settings = resolved("distrans", **own)
        task = NetworkShape((1, 16, 16), 10)
        single = build_classifier(settings.common, task)
        network = double_channels(single, settings.common, task.input_shape)
        arrays = {name: array.numpy() for name, array in exchanged_arrays(network).items()}
        if settings.own.offset_aggregation == "none":
            del arrays[OFFSET]
        return arrays

    return make


def offset_of(site: DisTransSite) -> torch.Tensor:
    network = cast(DoubleChannelClassifier, site.open())
    return network.offset.weight.detach().clone()


def test_the_network_and_the_offset_come_and_go_back_trained(
    opened: Opened, received: Weights
) -> None:
    sent = received()
    reply = answer(opened("distrans", sent))
    assert set(reply[ARRAYS]) == set(sent)
    moved = {n for n, array in reply[ARRAYS].items() if (array.numpy() != sent[n]).any()}
    assert {OFFSET, "head.logits.weight", "head.dense.1.weight", "encoder.stages.0.weight"} < moved
    assert reply[METRICS]["kept-state"] == 0


@pytest.mark.parametrize("rate", [0.0, 0.5, 2.0])
def test_the_offset_takes_a_step_of_its_own_rate_down_the_gradient_of_the_same_batch(
    opened: Opened, received: Weights, rate: float
) -> None:
    own = {**ONE_STEP, "offset_learning_rate": rate, "learning_rate": 0.125, "weight_decay": 0.5}
    site = opened("distrans", received(**own), own=own)
    network = cast(DoubleChannelClassifier, site.open())
    start = {name: p.detach().clone() for name, p in network.named_parameters()}
    twin = cast(DoubleChannelClassifier, site.open()).train()
    train = site.silo.train
    assert len(train) == 36, "one step must be of the whole training data"
    twin.loss(train.inputs, train.labels).backward()  # type: ignore[no-untyped-call]
    fitted(site, network)
    gradients = {name: cast(torch.Tensor, p.grad) for name, p in twin.named_parameters()}
    after = dict(network.named_parameters())
    wanted = start[OFFSET] - rate * gradients[OFFSET]
    torch.testing.assert_close(after[OFFSET].detach(), wanted)
    assert (after[OFFSET] != start[OFFSET]).any() == (rate > 0)
    name = "head.logits.weight"
    wanted = start[name] - 0.125 * (gradients[name] + 0.5 * start[name])
    torch.testing.assert_close(after[name].detach(), wanted)


def test_an_offset_that_stays_is_drawn_at_the_site_and_goes_on_where_it_was(
    opened: Opened, received: Weights
) -> None:
    own = {"offset_aggregation": "none", "offset_learning_rate": 0.5}
    sent = received(**own)
    first, other = (opened("distrans", sent, site=s, own=own) for s in ("s1a", "s2a"))
    drawn = offset_of(first)
    assert not torch.equal(drawn, offset_of(other)), "each site draws its own"
    reply = answer(first)
    assert OFFSET not in reply[ARRAYS]
    assert set(reply[ARRAYS]) == set(sent)
    assert reply[METRICS]["kept-state"] == 1
    later = opened("distrans", sent, own=own, round=2)
    assert set(later.stored_state) == {OFFSET}
    assert not torch.equal(offset_of(later), drawn)
    assert torch.equal(offset_of(later), later.stored_state[OFFSET])
    assert torch.equal(offset_of(opened("distrans", sent, own=own)), drawn), "round 1 asked again"
    final = opened("distrans", sent, own=own, round=2, phase="evaluate")
    assert torch.equal(offset_of(final), later.stored_state[OFFSET])


def test_an_offset_that_is_sent_to_a_site_that_keeps_its_own_is_not_taken(
    opened: Opened, received: Weights
) -> None:
    own = {"offset_aggregation": "none"}
    sent = received(**own) | {OFFSET: np.zeros((256, 1), np.float32)}
    assert offset_of(opened("distrans", sent, own=own)).abs().max() > 0.5


def test_of_a_finished_runs_offsets_a_site_takes_its_own(opened: Opened, received: Weights) -> None:
    own = {"offset_aggregation": "embedding"}
    sent = received(**own)
    plain = {name: array for name, array in sent.items() if name != OFFSET}
    named = {f"offset/{s}": np.full((256, 1), i, np.float32) for i, s in enumerate(("s1a", "s2a"))}
    found = offset_of(opened("distrans", plain | named, site="s2a", own=own, phase="evaluate"))
    assert found.eq(1).all()


def test_a_missing_offset_and_one_of_other_images_are_refused(
    opened: Opened, received: Weights
) -> None:
    sent = received()
    with refuses(SettingError, "offset.weight"):
        opened("distrans", {n: a for n, a in sent.items() if n != OFFSET}).open()
    other = sent | {OFFSET: np.zeros((784, 1), np.float32)}
    with refuses(SettingError, "offset.weight", "784", "1", "256"):
        opened("distrans", other).open()


def test_epochs_that_span_rounds_leave_the_offset_out_of_the_optimiser(
    opened: Opened, received: Weights
) -> None:
    own = {"epoch_steps": 4, "pace": 2, "local_epochs": 2, "batch_size": 32}
    own |= {"offset_learning_rate": 0.5}
    sent = received(**own)
    reply = answer(opened("distrans", sent, own=own))
    assert (reply[ARRAYS][OFFSET].numpy() != sent[OFFSET]).any()
    stored = opened("distrans", own=own, round=2).stored_state
    assert [name for name in stored if "head.logits.weight" in name]
    assert not [name for name in stored if OFFSET in name]


def _floors(minimum: int) -> Limits:
    return Limits(minimum_batch=minimum, minimum_steps_per_reply=1)


@pytest.mark.parametrize("network", ["conv", "resnet22"])
def test_a_site_explains_an_image_by_the_map_of_both_channels(
    opened: Opened, resolved: Callable[..., Any], network: str
) -> None:
    own = {"network": network, "width": 2}
    settings = resolved("distrans", **own)
    task = NetworkShape((1, 16, 16), 10)
    single = build_classifier(settings.common, task)
    double = double_channels(single, settings.common, task.input_shape)
    arrays = {name: array.numpy() for name, array in exchanged_arrays(double).items()}
    site = opened("distrans", arrays, own=own, phase="evaluate")
    if network == "resnet22":
        with pytest.raises(SettingError, match="single cell"):
            explain_sample(site, "test", 0)
        return
    assert explain_sample(site, "test", 0).lines()


def test_monte_carlo_dropout_has_an_entropy(opened: Opened, received: Weights) -> None:
    own = {"dropout": 0.5}
    found = evaluate(opened("distrans", received(**own), own=own, phase="evaluate"))
    assert 0 < float(cast(Any, found[METRICS])["incoming.test.entropy"]) <= np.log(10)


# At the server

Run = Callable[..., tuple[Any, RoundLoop]]
COMMON = CommonSettings(silos=3, width=2)


@pytest.fixture
def server(participants: Participants) -> Callable[..., DisTrans]:
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
    server: Callable[..., DisTrans],
) -> None:
    method = server()
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
    server: Callable[..., DisTrans], site_reply: Callable[..., Any]
) -> None:
    before = State({"w": np.float32([0]), OFFSET: np.zeros((2, 1), np.float32)}, 1)
    replies = {
        "s1a": site_reply("s1a", {"w": [1.0], OFFSET: [[2.0], [0.0]]}, num_examples=1),
        "s2a": site_reply("s2a", {"w": [5.0], OFFSET: [[6.0], [4.0]]}, num_examples=3),
    }
    after = state_after(server(), before, replies)
    assert after.arrays["w"].tolist() == [4.0]
    assert after.arrays[OFFSET].tolist() == [[5.0], [3.0]]
    assert set(evaluation_of(server(), after).send["s3a"]) == {"w", OFFSET}


def test_an_offset_that_stays_is_neither_sent_nor_expected(
    server: Callable[..., DisTrans],
) -> None:
    method = server("none")
    state = method.initial_state()
    for names in (arrays_sent(method, state)["s1a"], arrays_expected(method, state)["s1a"]):
        assert set(names) == set(state.arrays)
        assert OFFSET not in names


def test_an_embedding_makes_each_site_its_offset_from_its_class_shares(
    server: Callable[..., DisTrans], site_reply: Callable[..., Any]
) -> None:
    method = server("embedding")
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
    server: Callable[..., DisTrans],
) -> None:
    plain, raw = (
        server("embedding", dataclasses.replace(COMMON, pixel_scale=scale))
        for scale in ("standard", "raw")
    )
    expected = 127.5 * (plain.initial_state().arrays["offset/s1a"] + 1)
    found = raw.initial_state().arrays["offset/s1a"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("aggregation", "leaves"), [("mean", 2), ("embedding", 2), ("none", 1)])
def test_it_tells_what_an_offset_is_where_one_leaves(
    server: Callable[..., DisTrans], aggregation: str, leaves: int
) -> None:
    told = server(aggregation).disclosures().leaves
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
