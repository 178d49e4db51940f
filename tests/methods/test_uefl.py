"""Tests of the method 'uefl': equations, site, server and whole runs."""

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from fedsilo.client_app.methods.uefl import UEFLSite
from fedsilo.client_app.training.evaluation import tokens_of
from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import ARRAYS, METRICS, TRAIN, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.codebook import (
    codebook_loss,
    nearest_codewords,
    perplexity,
    straight_through,
)
from fedsilo.models.methods.uefl import UEFLSettings, uncertain_sites
from fedsilo.models.methods.uefl_books import gaussian_codebook, segment_dimension
from fedsilo.models.methods.uefl_network import CodeUse, UEFLNetwork
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.strategies.loop.ask import Question
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.uefl import CENTROIDS, UEFL, UNCERTAINTY, UEFLState
from fedsilo.strategies.wire.reply import Reply
from tests.support.asking import (
    NoReplies,
    ScriptedAsk,
    arrays_expected,
    arrays_sent,
    make_reply,
    state_after,
)
from tests.support.errors import refuses
from tests.support.lab import answer
from tests.support.methods import ALL, Opened, SharedRun, SiteReply, Tiny

# The equations

BOOK = torch.tensor([[0.0, 0.0], [4.0, 4.0]])


def _network(books: dict[str, Tensor] | None = None, **changes: float) -> UEFLNetwork:
    classifier = build_classifier(
        CommonSettings(width=1), NetworkShape((1, 16, 16), 3)
    )  # 4 tokens of 4
    settings = UEFLSettings(**changes)  # type: ignore[arg-type]  # field by field in the tests
    dimension = 4 // settings.segments
    return UEFLNetwork(
        classifier, books or {"0": gaussian_codebook(5, dimension, 1, 0)}, settings
    ).eval()


def _images() -> Tensor:
    return torch.randn(6, 1, 16, 16, generator=torch.Generator().manual_seed(5))


def test_each_token_takes_the_nearest_of_two_codewords() -> None:
    tokens = torch.tensor([[[1.0, 1.0], [3.0, 2.5]], [[-9.0, 0.0], [9.0, 9.0]]])
    found = nearest_codewords(tokens, BOOK)
    assert found.codes.tolist() == [[[0], [1]], [[0], [1]]]
    assert found.codewords.tolist() == [[[0.0, 0.0], [4.0, 4.0]], [[0.0, 0.0], [4.0, 4.0]]]


def test_segments_of_a_token_choose_for_themselves_from_one_book() -> None:
    tokens = torch.tensor([[[0.1, 0.0, 3.9, 4.0], [4.1, 4.0, 4.0, 4.0]]])
    found = nearest_codewords(tokens, BOOK, segments=2)
    assert found.codes.tolist() == [[[0, 1], [1, 1]]]
    assert found.codewords.tolist() == [[[0.0, 0.0, 4.0, 4.0], [4.0] * 4]]


def test_a_gradient_passes_straight_through_to_the_tokens() -> None:
    tokens = torch.tensor([[[1.0, 1.0], [3.0, 2.5]]], requires_grad=True)
    book = BOOK.clone().requires_grad_()
    read = straight_through(tokens, nearest_codewords(tokens, book).codewords)
    assert torch.equal(read, torch.tensor([[[0.0, 0.0], [4.0, 4.0]]]))
    weights = torch.tensor([[[1.0, 2.0], [3.0, -4.0]]])
    (read * weights).sum().backward()
    assert torch.equal(tokens.grad, weights)  # type: ignore[arg-type]  # set by backward
    assert book.grad is None


def test_the_codebook_loss_weighs_the_pull_on_codewords_and_the_commitment_of_tokens() -> None:
    tokens = torch.tensor([[[1.0, 3.0]]], requires_grad=True)
    codewords = torch.tensor([[[0.0, 1.0]]], requires_grad=True)
    loss = codebook_loss(tokens, codewords, codebook_weight=2.0, commitment_weight=0.5)
    assert loss.item() == pytest.approx((2.0 + 0.5) * (1 + 4) / 2)
    loss.backward()
    # d/dc of mean((c - z)^2) over two numbers is c - z = (-1, -2), and z - c for the tokens.
    assert codewords.grad is not None
    assert codewords.grad.tolist() == [[[2.0 * -1, 2.0 * -2]]]
    assert tokens.grad is not None
    assert tokens.grad.tolist() == [[[0.5 * 1, 0.5 * 2]]]


@pytest.mark.parametrize("codes", [1, 2, 32])
def test_the_perplexity_of_uniform_use_is_the_number_of_codes(codes: int) -> None:
    assert perplexity(torch.full((codes,), 7)) == pytest.approx(codes)


def test_the_perplexity_of_a_book_of_which_one_code_is_used_is_one() -> None:
    assert perplexity(torch.tensor([0, 12, 0, 0])) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("gamma", "uncertain"),
    [
        (0.0, ["s1b", "s2a", "s3a"]),
        (0.5, ["s2a", "s3a"]),  # threshold 0.375
        (1.0, ["s3a"]),  # threshold 0.5, which s2a meets: eq. 9 has "at most"
        (3.0, []),
    ],
)
def test_a_site_is_uncertain_above_one_plus_gamma_times_the_least_entropy(
    gamma: float, uncertain: list[str]
) -> None:
    entropies = {"s3a": 0.75, "s1a": 0.25, "s2a": 0.5, "s1b": 0.3125}
    assert uncertain_sites(entropies, gamma) == uncertain


def test_segments_divide_the_channels_or_are_refused() -> None:
    assert segment_dimension(64, 4) == 16
    with refuses(SettingError, "uefl.segments", "64", "3"):
        segment_dimension(64, 3)


def test_codebook_concatenates_books_in_the_order_of_their_numbers() -> None:
    books = {name: torch.full((2, 4), float(name)) for name in ("10", "2", "0")}
    assert _network(books).codebook()[:, 0].tolist() == [0.0, 0.0, 2.0, 2.0, 10.0, 10.0]


def test_the_head_reads_nothing_but_codewords_of_the_books_given() -> None:
    network = _network({"0": torch.eye(4), "1": -torch.eye(4)})
    read = network.features(network.encode(_images())).reshape(-1, 4)
    distance = torch.cdist(read, network.codebook()).min(dim=1).values
    assert distance.max().item() < 1e-5


def test_a_further_book_never_moves_a_token_away_from_its_codeword() -> None:
    first, second = gaussian_codebook(3, 4, 1, 0), gaussian_codebook(3, 4, 1, 1)
    tokens = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(2))
    small, large = _network({"0": first}), _network({"0": first, "1": second})
    assert torch.equal(large.codebook()[:3], small.codebook())
    errors = [
        (network.nearest(tokens).codewords - tokens).square().sum(dim=2)
        for network in (small, large)
    ]
    assert bool((errors[1] <= errors[0] + 1e-5).all())
    assert bool((errors[1] < errors[0] - 1e-3).any())


def test_the_loss_is_the_task_loss_and_the_weighted_codebook_terms() -> None:
    network, labels = _network(), torch.tensor([0, 1] * 3)
    tokens = network.encode(_images())
    codewords = network.nearest(tokens).codewords
    task = torch.nn.functional.cross_entropy(network.classify(codewords), labels)
    expected = task + 1.25 * (codewords - tokens).square().mean()
    assert network.loss(_images(), labels).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_mean_as_threshold_finds_fewer_uncertain_sites_than_the_least() -> None:
    entropies = {"a": 1.0, "b": 2.0, "c": 3.0}  # mean 2; times 1.3: 2.6, the least's 1.3
    assert uncertain_sites(entropies, 0.3, "least") == ["b", "c"]
    assert uncertain_sites(entropies, 0.3, "mean") == ["c"]


def test_layer_normalised_tokens_have_mean_zero_and_deviation_one() -> None:
    tokens = _network(token_norm="layer").encode(_images())
    assert torch.allclose(tokens.mean(dim=-1), torch.zeros(6, 4), atol=1e-5)
    assert torch.allclose(tokens.std(dim=-1, unbiased=False), torch.ones(6, 4), atol=0.05)


@pytest.mark.parametrize(
    ("sizes", "passes"),
    [({"train": 9, "val": 3}, True), ({"train": 9, "val": 0}, False), ({"train": 9}, False)],
)
def test_a_site_without_validation_samples_is_refused(
    sizes: Mapping[str, int], passes: bool
) -> None:
    own = UEFLSettings(max_iterations=2, refresh="none")
    with nullcontext() if passes else refuses(SettingError, "north", "split.val-folds"):
        own.refuse_small("north", sizes, 1000)
    own.refuse_small("sums", {}, 1000)  # it reports no sizes


def test_few_centroids_are_said_where_codes_times_floor_exceed_the_features() -> None:
    sites = {"s1": 900, "s2": 400, "s3": 2560}
    (told,) = UEFLSettings(codes=256).few_centroids(sites)
    assert told.startswith("2 sites (site s2 has 400 features) cannot fill 'uefl.codes' (256)")
    assert not UEFLSettings(codes=256, centroid_min_count=1).few_centroids(sites)
    gaussian = UEFLSettings(codes=256, codeword_start="gaussian", refresh="none")
    assert not gaussian.few_centroids(sites)


# At a site

WIDTH = 16  # channels of a width-4 network
SENT_BOOK = gaussian_codebook(4, WIDTH, 7, 0).numpy()


@pytest.fixture
def shared(weights: dict[str, Any]) -> dict[str, Any]:
    return {**weights, "codebook.0": SENT_BOOK}


def test_a_site_uses_only_the_books_that_came(opened: Opened, shared: dict[str, Any]) -> None:
    assert set(opened("uefl", shared).open().codebooks) == {"0"}
    more = {**shared, "codebook.2": SENT_BOOK + 1, "codebook.10": SENT_BOOK + 2}
    network = opened("uefl", more).open()
    assert set(network.codebooks) == {"0", "2", "10"}
    expected = torch.from_numpy(np.concatenate([SENT_BOOK, SENT_BOOK + 1, SENT_BOOK + 2]))
    assert torch.equal(network.codebook(), expected)


def test_a_site_sends_back_what_it_was_sent_trained(opened: Opened, shared: dict[str, Any]) -> None:
    reply = answer(opened("uefl", shared))
    assert set(reply[ARRAYS]) == set(shared)
    assert not np.array_equal(reply[ARRAYS]["codebook.0"].numpy(), SENT_BOOK)
    assert reply[ARRAYS]["codebook.0"].numpy().shape == SENT_BOOK.shape


@pytest.mark.parametrize("change", ["missing", "surplus"])
def test_weights_that_do_not_fit_are_refused(
    opened: Opened, shared: dict[str, Any], change: str
) -> None:
    if change == "missing":
        del shared["head.4.bias"]
    else:
        shared["odd"] = SENT_BOOK
    with pytest.raises(SettingError, match=rf"do not fit the network: .*{change} \['"):
        answer(opened("uefl", shared))


def test_one_codeword_has_perplexity_one_and_the_tokens_own_mean_square(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("uefl", {**weights, "codebook.0": np.zeros((1, WIDTH), np.float32)})
    network = method.open()
    found = method.measure_splits(network, "incoming", ("val",))
    tokens = tokens_of(network, method.silo.val, method.compute)
    assert tokens.shape == (4, 4, WIDTH)
    assert found["incoming.val.perplexity"] == 1.0
    distance = pytest.approx(float(tokens.square().mean()), rel=1e-5)
    assert found["incoming.val.codeword-distance"] == distance


def test_code_use_is_counted_over_all_batches(opened: Opened, shared: dict[str, Any]) -> None:
    network = opened("uefl", shared).open()
    use = CodeUse(network)
    with torch.no_grad():
        for code in range(4):
            use.see(network.codebook()[code].expand(2, 3, WIDTH) + 0.01)
    assert use.counts.tolist() == [6] * 4
    assert use.values()["perplexity"] == pytest.approx(4.0)
    assert use.values()["codeword-distance"] == pytest.approx(1e-4, rel=1e-3)
    assert use.values()["codebook-loss"] == pytest.approx(1.25e-4, rel=1e-3)


def test_the_codebook_loss_that_is_measured_is_that_which_is_trained(
    opened: Opened, shared: dict[str, Any]
) -> None:
    network = opened("uefl", shared).open()
    tokens = torch.randn(2, 3, WIDTH)
    use = CodeUse(network)
    with torch.no_grad():
        use.see(tokens)
    trained = codebook_loss(tokens, network.nearest(tokens).codewords, 1.0, 0.25)
    assert use.values()["codebook-loss"] == pytest.approx(trained.item(), rel=1e-5)


def test_perplexity_and_distance_stand_beside_every_measurement(
    opened: Opened, shared: dict[str, Any]
) -> None:
    metrics = answer(opened("uefl", shared))[METRICS]
    for where in ("incoming.val", "incoming.test", "trained.val"):
        assert 1 <= float(str(metrics[f"{where}.perplexity"])) <= 4
        assert float(str(metrics[f"{where}.codeword-distance"])) > 0


def test_the_uncertainty_phase_answers_with_an_entropy_and_trains_nothing(
    opened: Opened, shared: dict[str, Any]
) -> None:
    reply = answer(opened("uefl", shared, phase="uncertainty", step=1))
    assert ARRAYS not in reply
    measured = [key for key in reply[METRICS] if "." in key]
    assert measured == ["incoming.val.entropy"]
    assert 0 < float(str(reply[METRICS]["incoming.val.entropy"])) <= math.log(10)


def centroids_of(method: UEFLSite) -> tuple[Any, Any]:
    arrays = answer(method)[ARRAYS]
    return arrays["centroids"].numpy(), arrays["counts"].numpy()


def test_a_single_centroid_is_the_mean_of_the_training_features(
    opened: Opened, shared: dict[str, Any]
) -> None:
    method = opened("uefl", shared, own={"codes": 1}, phase="centroids", step=2)
    centres, counts = centroids_of(method)
    tokens = tokens_of(method.open(), method.silo.train, method.compute)
    np.testing.assert_allclose(
        centres, tokens.reshape(-1, WIDTH).mean(0)[None], rtol=1e-4, atol=1e-6
    )
    assert counts.tolist() == [36 * 4]


def test_centroids_stand_for_all_features_and_are_keyed_on_the_round(
    opened: Opened, shared: dict[str, Any]
) -> None:
    fields = {"phase": "centroids", "step": 2}
    centres, counts = centroids_of(opened("uefl", shared, **fields))
    again, _ = centroids_of(opened("uefl", shared, **fields))
    assert centres.shape == (4, WIDTH)
    assert counts.sum() == 36 * 4
    np.testing.assert_array_equal(centres, again)


def test_centroids_of_few_features_stay_at_the_site(opened: Opened, shared: dict[str, Any]) -> None:
    own = {"centroid_min_count": 36 * 4 + 1}
    method = opened("uefl", shared, own=own, phase="centroids")
    centres, counts = centroids_of(method)
    assert answer(method)[METRICS]["new-codewords"] == 0
    assert centres.shape == (0, WIDTH)
    assert counts.shape == (0,)


@pytest.mark.parametrize("extra", [{}, {"codebook.1": SENT_BOOK + 1}])
@pytest.mark.parametrize("site", ["s1a", "s2a", "s3a"])
def test_a_gaussian_start_of_a_shared_book_takes_nothing_from_any_site(
    opened: Opened, shared: dict[str, Any], site: str, extra: dict[str, Any]
) -> None:
    own = {"codeword_start": "gaussian"}
    method = opened("uefl", {**shared, **extra}, site=site, own=own, phase="centroids", step=2)
    reply = answer(method)
    assert set(reply) == {METRICS}
    always = {"num-examples", "seconds", "peak-memory-bytes", "kept-state"}
    assert set(reply[METRICS]) == {*always, "new-codewords"}
    assert reply[METRICS]["new-codewords"] == 4
    assert reply[METRICS]["kept-state"] == 0
    assert method.state_files.load_before(Instruction(2, "train")) is None


REFRESH = {"phase": "centroids", "step": 2, "notes": {"refreshes": True}}


def test_a_certain_site_lays_the_first_book_by_k_means_even_where_new_ones_start_gaussian(
    opened: Opened, shared: dict[str, Any]
) -> None:
    own = {"codeword_start": "gaussian"}
    centres, counts = centroids_of(opened("uefl", shared, own=own, **REFRESH))
    drawn, _ = centroids_of(opened("uefl", shared, phase="centroids", step=2))
    np.testing.assert_array_equal(centres, drawn)
    assert counts.sum() == 36 * 4


def test_an_evidential_head_is_asked_for_its_vacuity_beside_the_code_use(
    opened: Opened, shared: dict[str, Any]
) -> None:
    lab = opened("uefl", shared, own={"loss": "evidential"})
    found = lab.measure_splits(lab.open(), "incoming", ("test",))
    assert {"incoming.test.vacuity", "incoming.test.perplexity"} <= found.keys()


# At the server. The server side of UEFL by hand: states of one weight and books of two codewords.

ENTROPY = "incoming.val.entropy"
GAUSSIAN = {"codeword_start": "gaussian"}
NOTHING = {"centroids": np.zeros((0, 2), np.float32), "counts": np.zeros(0, np.float32)}
FAR = np.array([[0.0, 0.0], [50.0, 50.0]], np.float32)
Build = Callable[..., UEFL]


@pytest.fixture
def uefl(participants: Participants) -> Build:
    def build(rounds: int = 30, **own: Any) -> UEFL:
        return UEFL(
            CommonSettings(rounds=rounds, seed=7, silos=3),
            UEFLSettings(**{"iteration_rounds": 5, **own}),
            participants,
        )

    return build


def book(value: float) -> Any:
    return np.full((2, 2), value, np.float32)


def state(round_: int = 0, **own: Any) -> UEFLState:
    """Return a state with book 0 for all sites and book 1 for s2a and s3a."""
    arrays = {"w": np.zeros(1, np.float32), "codebook.0": book(0), "codebook.1": book(1)}
    access = {"0": ALL, "1": ["s2a", "s3a"]}
    return UEFLState(arrays, round_, **{"access": access, **own})


def judging(
    strategy: UEFL,
    before: UEFLState,
    uncertain: Collection[str] = (),
    centroids: Mapping[str, Reply] | None = None,
) -> ScriptedAsk:
    """Return the ask of an iteration's last round that trains nothing and finds ``uncertain``."""
    given = {
        TRAIN: {site: make_reply(site, strategy.model_for(site, before)) for site in ALL},
        UNCERTAINTY: {
            site: make_reply(site, **{ENTROPY: 2.0 if site in uncertain else 1.0}) for site in ALL
        },
        **({} if centroids is None else {CENTROIDS: centroids}),
    }
    return ScriptedAsk(ALL, given)


def asked_in(
    strategy: UEFL, phase: str, uncertain: Collection[str] = (), done: int = 4, **own: Any
) -> Question | None:
    """Return what the round after ``done`` asks in ``phase``, None where nobody is asked."""
    ask = judging(strategy, state(done, **own), uncertain)
    with suppress(NoReplies):
        strategy.round(state(done, **own), ask)
    return ask.asked.get(phase)


def extended(
    strategy: UEFL, uncertain: Collection[str], centroids: Mapping[str, Reply]
) -> UEFLState:
    """Return the state after the fifth round, in which sites sent ``centroids``."""
    return strategy.round(state(4), judging(strategy, state(4), uncertain, centroids))


def fault_in(strategy: UEFL, phase: str, reply: Reply) -> str | None:
    """Return why the method cannot use a reply of the fifth round."""
    asked = asked_in(strategy, phase, ["s1a"])
    assert asked is not None
    assert asked.fault is not None
    return asked.fault(reply)


def same(after: UEFLState, before: UEFLState, but: Collection[str] = ()) -> bool:
    """Tell whether all of ``before`` is in ``after`` as it was."""
    return all(
        np.array_equal(after.arrays[name], array)
        for name, array in before.arrays.items()
        if name not in but
    )


@pytest.mark.parametrize(
    ("max_iterations", "rounds", "checked"),
    [(3, 10, [2, 5]), (4, 10, [2, 5, 8]), (9, 8, [2, 5]), (1, 10, [])],
)
def test_uncertainty_is_asked_only_when_an_iteration_ends(
    uefl: Build, max_iterations: int, rounds: int, checked: list[int]
) -> None:
    strategy = uefl(rounds, iteration_rounds=2, extension_rounds=3, max_iterations=max_iterations)
    found, iteration = [], 1
    for round_ in range(rounds):
        before = state(round_, iteration=iteration)
        ask = judging(strategy, before, ["s1a"], {})
        strategy.round(before, ask)
        if list(ask.asked) == [TRAIN, UNCERTAINTY, CENTROIDS]:
            found.append(round_ + 1)
            iteration += 1
        else:
            assert list(ask.asked) == [TRAIN]
    assert found == checked


@pytest.mark.parametrize(("refresh", "asked"), [("none", ["s3a"]), ("kmeans", ALL)])
def test_sites_above_the_threshold_are_asked_for_a_new_book_the_others_for_the_first(
    uefl: Build, site_reply: SiteReply, refresh: str, asked: list[str]
) -> None:
    strategy = uefl(gamma=0.3, refresh=refresh)
    entropies = {"s1a": 1.0, "s2a": 1.25, "s3a": 1.35}  # the threshold is 1.3
    ask = judging(strategy, state(4), (), {})
    ask.given[UNCERTAINTY] = {s: site_reply(s, **{ENTROPY: e}) for s, e in entropies.items()}
    after = strategy.round(state(4), ask)
    assert sorted(ask.asked[CENTROIDS].send) == asked
    notes = {s: notes.to_values()["refreshes"] for s, notes in ask.asked[CENTROIDS].notes.items()}
    assert notes == {site: site != "s3a" for site in asked}
    assert sorted(ask.asked[TRAIN].send) == ALL
    assert ask.asked[TRAIN].notes == {}
    assert after.iteration == 2
    assert after.entropies == [{"round": 5, "entropies": entropies, "uncertain": ["s3a"]}]
    assert not strategy.why_finished(after)


@pytest.mark.parametrize(("threshold", "uncertain"), [("least", ["s2a", "s3a"]), ("mean", ["s3a"])])
def test_gamma_compares_with_the_least_entropy_or_with_their_mean(
    uefl: Build, site_reply: SiteReply, threshold: str, uncertain: list[str]
) -> None:
    strategy = uefl(gamma=0.1, threshold=threshold, refresh="none")
    entropies = {"s1a": 1.0, "s2a": 1.25, "s3a": 1.35}  # 1.1 times 1.0, or times 1.2: 1.1 or 1.32
    ask = judging(strategy, state(4), (), {})
    ask.given[UNCERTAINTY] = {s: site_reply(s, **{ENTROPY: e}) for s, e in entropies.items()}
    after = strategy.round(state(4), ask)
    assert [check["uncertain"] for check in after.entropies] == [uncertain]
    assert sorted(ask.asked[CENTROIDS].send) == uncertain


@pytest.mark.parametrize(
    ("own", "sites"),
    [
        ({"codes": 14}, 0),  # 140 of 36 images of 4 tokens, which are 144 features
        ({"codes": 15}, 3),
        ({"codes": 15, "segments": 2}, 0),  # twice as many features
        ({"codes": 15, "centroid_min_count": 9}, 0),
        ({"codes": 145, "centroid_min_count": 1}, 3),
    ],
)
def test_a_run_says_first_which_sites_have_too_few_features_for_codes_times_min_count(
    uefl: Build, own: dict[str, Any], sites: int
) -> None:
    told = uefl(**own).notices()
    assert len(told) == bool(sites)
    assert all(line.startswith(f"{sites} sites (site s1a has 144 features)") for line in told)


@pytest.mark.parametrize("refresh", ["kmeans", "none"])
@pytest.mark.parametrize("stop", [True, False])
def test_the_run_ends_once_no_site_is_uncertain_if_it_may(
    uefl: Build, site_reply: SiteReply, stop: bool, refresh: str
) -> None:
    strategy = uefl(gamma=0.3, stop_when_certain=stop, refresh=refresh)
    ask = judging(strategy, state(4), (), {})
    after = replace(strategy.round(state(4), ask), round=5)
    refreshes = refresh == "kmeans" and not stop  # a book that is re-initialised must be trained
    assert sorted(ask.asked[CENTROIDS].send) == (ALL if refreshes else [])
    assert bool(strategy.why_finished(after)) is stop


def test_a_run_goes_on_while_a_silo_may_be_uncertain(uefl: Build) -> None:
    assert uefl(5).why_finished(state(4)) is None


def test_a_run_that_ends_early_says_why(uefl: Build) -> None:
    assert uefl(5).why_finished(state(5, certain=True)) is None
    reason = uefl(5).why_finished(state(3, certain=True))
    assert "after round 3 no silo's entropy is above 1.3" in str(reason)


def test_a_book_goes_only_to_the_sites_that_may_use_it(uefl: Build) -> None:
    sent = {site: set(arrays_sent(uefl(), state())[site]) for site in ALL}
    assert sent["s1a"] == {"w", "codebook.0"}
    assert sent["s2a"] == sent["s3a"] == {"w", "codebook.0", "codebook.1"}
    for site in ALL:
        assert set(arrays_expected(uefl(), state())[site]) == sent[site]


def test_a_book_is_averaged_over_its_users_alone_by_their_counts(
    uefl: Build, site_reply: SiteReply
) -> None:
    replies = {
        "s1a": site_reply("s1a", {"w": [4.0], "codebook.0": book(4)}, num_examples=4),
        "s2a": site_reply(
            "s2a", {"w": [8.0], "codebook.0": book(8), "codebook.1": book(1)}, num_examples=1
        ),
        "s3a": site_reply(
            "s3a", {"w": [0.0], "codebook.0": book(0), "codebook.1": book(5)}, num_examples=3
        ),
    }
    after = state_after(uefl(), state(uncertain=["s3a"]), replies)
    np.testing.assert_array_equal(after.arrays["w"], np.float32([3]))
    np.testing.assert_array_equal(after.arrays["codebook.0"], book(3))
    np.testing.assert_array_equal(after.arrays["codebook.1"], book(4))
    assert list(after.uncertain) == []


def test_a_book_whose_users_all_failed_stays_as_it_was(uefl: Build, site_reply: SiteReply) -> None:
    replies = {"s1a": site_reply("s1a", {"w": [4.0], "codebook.0": book(9)})}
    after = state_after(uefl(), state(), replies)
    np.testing.assert_array_equal(after.arrays["codebook.1"], book(1))
    np.testing.assert_array_equal(after.arrays["codebook.0"], book(9))


def test_an_extension_adds_a_book_for_its_sites_and_changes_no_other(
    uefl: Build, site_reply: SiteReply
) -> None:
    centroids = {"centroids": np.float32([[7, 7]]), "counts": np.float32([3])}
    before = state(4)
    replies = {"s1a": site_reply("s1a", centroids, new_codewords=1)}
    after = extended(uefl(codes=2), ["s1a"], replies)
    assert set(after.arrays) - set(before.arrays) == {"codebook.2"}
    np.testing.assert_array_equal(after.arrays["codebook.2"], np.float32([[7, 7]]))
    for name, array in before.arrays.items():
        np.testing.assert_array_equal(after.arrays[name], array)
    assert after.access == {**before.access, "2": ["s1a"]}
    assert after.extended == {"5": ["s1a"]}


def test_centroids_of_several_sites_are_merged_by_their_counts(
    uefl: Build, site_reply: SiteReply
) -> None:
    replies = {
        "s1a": site_reply(
            "s1a", {"centroids": [[0.0, 0.0]], "counts": np.float32([1])}, new_codewords=1
        ),
        "s2a": site_reply(
            "s2a", {"centroids": [[4.0, 8.0]], "counts": np.float32([3])}, new_codewords=1
        ),
    }
    after = extended(uefl(codes=1), ["s1a", "s2a"], replies)
    np.testing.assert_allclose(after.arrays["codebook.2"], [[3.0, 6.0]])


def centroids(site_reply: SiteReply, site: str, *rows: tuple[list[float], int]) -> Reply:
    arrays = {
        "centroids": np.float32([centre for centre, _ in rows]),
        "counts": np.float32([count for _, count in rows]),
    }
    return site_reply(site, arrays, new_codewords=len(rows))


def test_the_first_book_is_laid_anew_by_the_certain_sites_features_weighted_by_count(
    uefl: Build, site_reply: SiteReply
) -> None:
    replies = {
        "s1a": centroids(site_reply, "s1a", ([0.0, 0.0], 1), ([10.0, 0.0], 2)),
        "s2a": centroids(site_reply, "s2a", ([4.0, 0.0], 3), ([13.0, 0.0], 1)),
        "s3a": centroids(site_reply, "s3a", ([90.0, 0.0], 4), ([70.0, 0.0], 4)),
    }
    after = extended(uefl(codes=2), ["s3a"], replies)
    first = after.arrays["codebook.0"]
    np.testing.assert_allclose(first[first[:, 0].argsort()], [[3, 0], [11, 0]])  # 12/4 and 33/3
    np.testing.assert_array_equal(after.arrays["codebook.1"], book(1))
    np.testing.assert_array_equal(after.arrays["codebook.2"], [[90, 0], [70, 0]])
    assert after.refreshed == [5]
    assert after.extended == {"5": ["s3a"]}
    assert UEFL.marks(after)[5] == "new codewords for s3a; first codewords re-initialised"


def test_certain_sites_without_a_large_enough_cluster_leave_the_first_book_as_it_was(
    uefl: Build, site_reply: SiteReply
) -> None:
    after = extended(
        uefl(stop_when_certain=False), [], {"s1a": site_reply("s1a", NOTHING, new_codewords=0)}
    )
    assert same(after, state(4))
    assert (list(after.refreshed), after.extended) == ([], {})


def test_where_all_sites_are_certain_the_first_book_is_laid_anew_and_none_is_added(
    uefl: Build, site_reply: SiteReply
) -> None:
    replies = {"s1a": centroids(site_reply, "s1a", ([4.0, 0.0], 3))}
    after = extended(uefl(codes=2, stop_when_certain=False), [], replies)
    np.testing.assert_array_equal(after.arrays["codebook.0"], [[4, 0]])
    assert set(after.arrays) == {"w", "codebook.0", "codebook.1"}
    assert UEFL.marks(after) == {5: "first codewords re-initialised"}


@pytest.mark.parametrize(
    ("own", "uncertain", "certain"),
    [
        ({}, True, True),
        ({"refresh": "none"}, True, False),
        (GAUSSIAN, False, True),
        (GAUSSIAN | {"refresh": "none"}, False, False),
    ],
)
@pytest.mark.parametrize("last", [1, 5])  # after the first round, too, it is a refresh
def test_centroids_are_expected_of_the_sites_that_cluster_for_a_shared_book(
    uefl: Build, own: dict[str, Any], uncertain: bool, certain: bool, last: int
) -> None:
    strategy = uefl(iteration_rounds=last, **own)
    asked = asked_in(strategy, CENTROIDS, ["s3a"], last - 1)
    assert asked is not None
    assert bool(asked.expect["s3a"]) is uncertain
    assert bool(asked.expect.get("s1a")) is certain


@pytest.mark.parametrize("sites", [["s1a"], ["s2a"], ["s1a", "s2a"]])
def test_a_gaussian_extension_is_drawn_by_the_server_and_keyed_on_the_books_number(
    uefl: Build, site_reply: SiteReply, sites: list[str]
) -> None:
    strategy = uefl(codes=2, codeword_start="gaussian", refresh="none")
    before = state(4)
    asked = asked_in(strategy, CENTROIDS, sites)
    assert asked is not None
    assert all(asked.expect[site] == {} for site in sites)
    # s1a has book 0, s2a books 0 and 1
    replies = {site: site_reply(site, new_codewords=2) for site in sites}
    assert asked.fault is not None
    assert all(asked.fault(reply) is None for reply in replies.values())
    after = extended(strategy, sites, replies)
    assert set(after.arrays) - set(before.arrays) == {"codebook.2"}
    drawn = after.arrays["codebook.2"]
    np.testing.assert_array_equal(drawn, gaussian_codebook(2, 2, 7, 2))
    for earlier in (0, 1):
        assert not np.array_equal(drawn, gaussian_codebook(2, 2, 7, earlier))
        assert not np.array_equal(drawn, after.arrays[f"codebook.{earlier}"])
    assert after.access["2"] == sites


@pytest.mark.parametrize(
    ("rows", "counts", "fits"),
    [
        (2, [1, 5], True),
        (0, [], True),
        (2, [1], False),
        (1, [1, 5], False),
        (1, [0], False),
        (2, [3, -1], False),
        (1, [0.5], False),
        (2, [3, 1.5], False),
    ],
)
def test_centroids_whose_counts_cannot_be_are_objected_to(
    uefl: Build, site_reply: SiteReply, rows: int, counts: list[float], fits: bool
) -> None:
    arrays = {"centroids": np.zeros((rows, 2), np.float32), "counts": np.float32(counts)}
    told = fault_in(uefl(), CENTROIDS, site_reply("s1a", arrays, new_codewords=rows))
    assert told is None if fits else f"{rows} centroids came with counts" in str(told)


def test_an_uncertainty_reply_must_have_its_entropy(uefl: Build) -> None:
    asked = asked_in(uefl(), UNCERTAINTY)
    assert asked is not None
    assert asked.metrics == [ENTROPY]


@pytest.mark.parametrize("own", [{}, GAUSSIAN])
def test_a_centroids_reply_without_its_number_of_codewords_is_objected_to(
    uefl: Build, site_reply: SiteReply, own: dict[str, Any]
) -> None:
    asked = asked_in(uefl(**own), CENTROIDS, ["s1a"])
    assert asked is not None
    assert asked.metrics == ["new-codewords"]


def test_as_many_centroids_must_come_as_codewords_are_told(
    uefl: Build, site_reply: SiteReply
) -> None:
    arrays = {"centroids": np.zeros((1, 2), np.float32), "counts": np.ones(1, np.float32)}
    told = fault_in(uefl(), CENTROIDS, site_reply("s1a", arrays, new_codewords=2))
    assert told == "1 centroids came with counts [1.0]"


@pytest.mark.parametrize("own", [GAUSSIAN])
@pytest.mark.parametrize("number", [-1, 0.5, 5, 1e12, float("nan")])
def test_a_number_of_codewords_that_cannot_be_is_objected_to(
    uefl: Build, site_reply: SiteReply, own: dict[str, Any], number: float
) -> None:
    reply = site_reply("s1a", new_codewords=number)
    told = fault_in(uefl(**{"codes": 4, **own}), CENTROIDS, reply)
    assert told == f"it started {number:g} codewords, and 'uefl.codes' is 4"


@pytest.mark.parametrize("own", [{}, GAUSSIAN])
def test_a_round_without_any_new_codeword_is_marked_and_changes_nothing_else(
    uefl: Build, site_reply: SiteReply, own: dict[str, Any]
) -> None:
    strategy, before = uefl(**own), state(4)
    reply = site_reply("s1a", None if own else NOTHING, new_codewords=0)
    assert fault_in(strategy, CENTROIDS, reply) is None
    after = extended(strategy, ["s1a"], {"s1a": reply})
    assert same(after, before)
    assert (after.extended, after.access) == ({"5": []}, before.access)


def test_a_site_without_new_codewords_gets_no_book(uefl: Build, site_reply: SiteReply) -> None:
    centroids = {"centroids": np.float32([[7, 7]]), "counts": np.float32([3])}
    replies = {
        "s1a": site_reply("s1a", NOTHING, new_codewords=0),
        "s2a": site_reply("s2a", centroids, new_codewords=1),
    }
    after = extended(uefl(codes=2), ["s1a", "s2a"], replies)
    np.testing.assert_array_equal(after.arrays["codebook.2"], np.float32([[7, 7]]))
    assert after.access["2"] == after.extended["5"] == ["s2a"]


def test_marks_say_in_which_rounds_codewords_came_and_for_whom() -> None:
    assert UEFL.marks(state()) == {}
    marks = UEFL.marks(state(extended={"5": ["s1a", "s3a"], "9": []}))
    assert marks[5] == "new codewords for s1a, s3a"
    assert "'uefl.centroid-min-count'" in marks[9]
    assert set(marks) == {5, 9}


@pytest.mark.parametrize(
    ("own", "books", "centroids"),
    [
        ({}, True, "after each iteration: "),
        ({"refresh": "none"}, True, "when uncertain: "),
        (GAUSSIAN, True, "when certain: "),
        (GAUSSIAN | {"refresh": "none"}, True, ""),
    ],
)
def test_uefl_says_what_leaves_a_site(
    uefl: Build, own: dict[str, Any], books: bool, centroids: str
) -> None:
    told = uefl(centroid_min_count=12, **own).disclosures().leaves
    assert "all weights" in told[0]
    assert any("codebooks" in line for line in told) is books
    assert any(centroids in line and "fewer than 12" in line for line in told) is bool(centroids)
    assert len(told) == 1 + books + bool(centroids)


def test_the_first_book_is_gaussian_and_for_all_sites(uefl: Build) -> None:
    first = uefl(codes=5, segments=2).initial_state()
    np.testing.assert_array_equal(first.arrays["codebook.0"], gaussian_codebook(5, 32, 7, 0))
    assert first.access == {"0": ALL}
    with pytest.raises(SettingError, match="segments"):
        uefl(segments=3).initial_state()


def test_a_site_without_validation_samples_is_refused_unless_nothing_is_judged(
    participants: Participants,
) -> None:
    counts = {"train": [36], "val": [0], "test": [10]}
    blind = {**participants.facts, "s2a": replace(participants.facts["s2a"], label_counts=counts)}
    common = CommonSettings(silos=3)
    there = Participants(blind, participants.nodes)
    with refuses(SettingError, "s2a", "split.val-folds"):
        UEFL(common, UEFLSettings(max_iterations=2), there).initial_state()
    assert UEFL(common, UEFLSettings(max_iterations=1), there).initial_state().arrays


def test_a_site_of_fewer_features_than_codewords_is_refused_if_it_may_have_to_lay_them(
    participants: Participants,
) -> None:
    common = CommonSettings(silos=3, width=4)
    told = (
        r"^site s1a has 144 features for 'uefl.codes' 145 codewords: lower 'uefl.codes', or "
        "set 'uefl.refresh' to 'none'$"
    )  # 36 images of four tokens
    with pytest.raises(SettingError, match=told):
        UEFL(common, UEFLSettings(codes=145), participants).initial_state()
    for fixed in ({"codes": 144}, {"codes": 145, "refresh": "none"}):
        settings = UEFLSettings(**fixed)  # type: ignore[arg-type]  # of several types
        assert UEFL(common, settings, participants).initial_state().arrays


def test_a_run_too_short_for_an_extension_is_refused_unless_it_is_disfl() -> None:
    with refuses(SettingError, "rounds", "19", "uefl.iteration-rounds", "20"):
        UEFLSettings().check(CommonSettings(rounds=19), is_table=False)
    UEFLSettings().check(CommonSettings(rounds=21), is_table=False)
    UEFLSettings(max_iterations=1).check(CommonSettings(rounds=19), is_table=False)


def test_a_run_that_ends_with_its_first_iteration_is_refused_as_it_never_extends() -> None:
    with pytest.raises(SettingError, match="no codebook would ever be extended"):
        UEFLSettings(iteration_rounds=20).check(CommonSettings(rounds=20), is_table=False)


def test_a_kmeans_first_book_is_asked_of_all_sites_before_the_first_training(uefl: Build) -> None:
    strategy = uefl(first_book="kmeans", codes=2)
    before = replace(state(0), access={"0": ALL, "1": []})
    centres = np.array([[1, 1], [5, 5]], np.float32)
    sent = {"centroids": centres, "counts": np.array([10, 30], np.float32)}
    found = {s: make_reply(s, sent, **{"new-codewords": 2.0}) for s in ALL}
    ask = judging(strategy, before, centroids=found)
    after = strategy.round(before, ask)
    assert list(ask.asked) == [CENTROIDS, TRAIN]
    assert all(notes.refreshes for notes in ask.asked[CENTROIDS].notes.values())  # type: ignore[attr-defined]
    sent_books = ask.asked[TRAIN].send["s1a"]["codebook.0"]
    assert sorted(sent_books.tolist()) == [[1.0, 1.0], [5.0, 5.0]]
    assert after.refreshed == ()
    assert CENTROIDS not in asked_phases(strategy, replace(before, round=1))


def asked_phases(strategy: UEFL, before: UEFLState) -> Collection[str]:
    """Return what the round after ``before`` asks, up to where no reply is given."""
    ask = judging(strategy, before)
    with suppress(NoReplies):
        strategy.round(before, ask)
    return ask.asked


def test_a_site_reads_all_books_that_it_was_given(uefl: Build) -> None:
    centres = {"centroids": book(3), "counts": np.array([10, 10], np.float32)}
    found = {"s2a": make_reply("s2a", centres, **{"new-codewords": 2.0})}
    own = {"refresh": "none", "iteration_rounds": 5}
    after = extended(uefl(**own), ["s2a"], found)
    assert after.access == {"0": ALL, "1": ["s2a", "s3a"], "2": ["s2a"]}


# Whole runs. Whole runs of UEFL over real sites, every message looked at.

Run = Callable[..., tuple[Any, Any]]


def books(content: RecordDict) -> set[str]:
    record = content.array_records.get(ARRAYS, {})
    return {name.removeprefix("codebook.") for name in record if name.startswith("codebook.")}


def test_a_site_never_receives_nor_sends_a_book_it_was_not_given(
    shared_run: SharedRun, tiny: Tiny, told: Any
) -> None:
    grid, strategy, _ = shared_run(tiny("uefl", rounds=4))
    access = strategy.state.access
    given_in = {round_: str(i + 1) for i, round_ in enumerate(strategy.state.extended)}
    assert given_in == {"1": "1", "2": "2"}
    assert any(sites != ["s1a", "s2a", "s3a"] for sites in access.values())
    site_of = {node: site for site, node in strategy.method.participants.nodes.items()}
    for message in grid.sent[3:]:
        site, round_ = site_of[message.metadata.dst_node_id], told(message)["round"]
        older = {b for b in access if b == "0" or int(b) < round_}
        assert books(message.content) == {b for b in older if site in access[b]}
    for message, reply in zip(grid.sent[3:], grid.replies[3:], strict=True):
        assert books(reply.content) <= books(message.content)


def test_the_codebook_only_grows_and_max_iterations_bounds_it(
    spied_run: Run, tiny: Tiny, recorder: Any
) -> None:
    spied_run(tiny("uefl", rounds=5, max_iterations=3), [recorder])
    known = [{n for n in state.arrays if n.startswith("codebook.")} for state in recorder.states]
    assert [len(names) for names in known] == [2, 3, 3, 3, 3]
    for before, after in itertools.pairwise(known):
        assert before <= after
    sizes = {len(state.arrays["codebook.0"]) for state in recorder.states}
    assert sizes == {4}


def test_only_uncertain_sites_are_asked_and_all_numbers_of_a_check_are_kept(
    shared_run: SharedRun, tiny: Tiny
) -> None:
    _, strategy, recorder = shared_run(tiny("uefl", rounds=3, refresh="none"))
    check = strategy.state.entropies[0]
    least = min(check["entropies"].values())
    assert check["uncertain"] == sorted(s for s, e in check["entropies"].items() if e > least)
    assert (1, UNCERTAINTY, ["s1a", "s2a", "s3a"]) in recorder.phases
    asked = [phase for phase in recorder.phases if phase[:2] == (1, CENTROIDS)]
    assert asked == [(1, CENTROIDS, check["uncertain"])]
    assert all(0 < entropy <= math.log(10) for entropy in check["entropies"].values())


def test_a_run_with_every_departure_from_the_letter_keeps_its_books_apart(
    spied_run: Run, tiny: Tiny, recorder: Any
) -> None:
    departures = {
        "first_book": "kmeans",
        "token_norm": "layer",
        "threshold": "mean",
        "centroid_min_count": 1,
    }
    grid, strategy = spied_run(tiny("uefl", rounds=3, **departures), [recorder])
    assert recorder.phases[0][:2] == (1, CENTROIDS)
    for message in grid.sent[3:]:
        site_books = [n for n in message.content.array_records.get(ARRAYS, {}) if "codebook" in n]
        assert 1 <= len(site_books) <= len(strategy.state.access)


def test_disfl_never_asks_for_uncertainty_nor_extends(
    spied_run: Run, tiny: Tiny, recorder: Any
) -> None:
    _, strategy = spied_run(tiny("uefl", rounds=3, max_iterations=1), [recorder])
    assert {phase for _, phase, _ in recorder.phases} == {"train", "evaluate"}
    assert strategy.state.access == {"0": ["s1a", "s2a", "s3a"]}


def test_certain_sites_end_the_run_before_its_rounds_are_used_up(
    spied_run: Run, tiny: Tiny, recorder: Any
) -> None:
    values = tiny("uefl", rounds=5, gamma=9.0, stop_when_certain=True)
    _, strategy = spied_run(values, [recorder])
    assert strategy.state.round == 1
    assert recorder.events[-1] == ("run ended", 1)
    assert len(strategy.state.access) == 1


def test_centroids_that_leave_a_site_are_fewer_than_its_features(
    shared_run: SharedRun, tiny: Tiny
) -> None:
    grid, _, _ = shared_run(tiny("uefl", rounds=4))
    found = [
        r.content for r in grid.replies if "centroids" in r.content.array_records.get(ARRAYS, {})
    ]
    assert found
    for content in found:
        counts = content[ARRAYS]["counts"].numpy()
        assert len(content[ARRAYS]["centroids"].numpy()) == len(counts) <= 4
        assert counts.sum() == 36 * 4  # each of 36 images has four tokens


def test_a_gaussian_start_of_shared_books_takes_nothing_from_the_sites(
    spied_run: Run, tiny: Tiny, recorder: Any
) -> None:
    values = tiny("uefl", rounds=3, codeword_start="gaussian", refresh="none")
    grid, strategy = spied_run(values, [recorder])
    first, second = recorder.states[0].arrays, recorder.states[1].arrays
    dimension = first["codebook.0"].shape[1]
    for number, book in (("1", first["codebook.1"]), ("2", second["codebook.2"])):
        np.testing.assert_array_equal(book, gaussian_codebook(4, dimension, 7, int(number)))
        assert number in strategy.state.access
    replies = [
        reply.content
        for message, reply in zip(grid.sent[3:], grid.replies[3:], strict=True)
        if message.content["config"]["phase"] == CENTROIDS
    ]
    assert replies
    assert all(ARRAYS not in content for content in replies)


@pytest.mark.parametrize(
    ("phase", "said"), [(UNCERTAINTY, "incoming.val.entropy"), (CENTROIDS, "counts")]
)
def test_a_reply_that_lacks_what_its_phase_is_for_is_a_failing_site(
    spy_grid: Any,
    fake_app: Any,
    content: Any,
    answering: Any,
    participants: Any,
    phase: str,
    said: str,
) -> None:
    def answer(message: Message) -> Any:
        asked = message.content["config"]["phase"]
        if asked == phase == UNCERTAINTY:
            return content()
        if asked == UNCERTAINTY:
            return content(**{"incoming.val.entropy": message.metadata.dst_node_id / 1001})
        if asked == CENTROIDS:
            arrays = {"centroids": np.zeros((3, 2), np.float32), "counts": np.ones(1, np.float32)}
            return content(arrays, new_codewords=3)
        return answering()(message)

    own = UEFLSettings(iteration_rounds=1, gamma=0.0, codes=1)
    common = CommonSettings(rounds=2, silos=3, run_name="run")
    strategy = RoundLoop(UEFL(common, own, participants), run_dir="/somewhere")
    first = strategy.method.initial_state()
    arrays = {"w": np.zeros(1, np.float32), "codebook.0": np.zeros((1, 2), np.float32)}
    strategy.state = replace(first, arrays=arrays)
    with pytest.raises(SiteError, match=f"round 1, phase {phase}: .*{said}"):
        strategy.start(spy_grid(fake_app(answer)), 2)


def test_a_run_lays_the_first_book_anew_by_the_certain_sites_own_features(
    shared_run: SharedRun, tiny: Tiny
) -> None:
    grid, strategy, _ = shared_run(tiny("uefl", rounds=4))
    assert strategy.state.refreshed[:2] == [1, 2]
    uncertain = {c["round"]: c["uncertain"] for c in strategy.state.entropies}
    site_of = {node: site for site, node in strategy.method.participants.nodes.items()}
    for message in grid.sent[3:]:
        told = message.content["config"]
        if told["phase"] == CENTROIDS:
            certain = site_of[message.metadata.dst_node_id] not in uncertain[told["round"]]
            assert told["note.refreshes"] is certain
    plain, _, _ = shared_run(tiny("uefl", rounds=3, refresh="none"))
    sent = [m for m in grid.sent[3:] if m.content["config"]["round"] == 2]
    unlaid = [m for m in plain.sent[3:] if m.content["config"]["round"] == 2]
    first, unchanged = (m[0].content[ARRAYS]["codebook.0"].numpy() for m in (sent, unlaid))
    assert first.shape == unchanged.shape == (4, 16)
    assert not np.array_equal(first, unchanged)
