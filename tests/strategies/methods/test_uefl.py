"""The server side of UEFL by hand: states of one weight and books of two codewords."""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import TRAIN
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.uefl import UEFLSettings
from fedsilo.models.methods.uefl_books import gaussian_codebook
from fedsilo.strategies.loop.ask import Question
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

ENTROPY = "incoming.val.entropy"
GAUSSIAN = {"codeword_start": "gaussian"}
ALL = ["s1a", "s2a", "s3a"]
NOTHING = {"centroids": np.zeros((0, 2), np.float32), "counts": np.zeros(0, np.float32)}
FAR = np.array([[0.0, 0.0], [50.0, 50.0]], np.float32)
Build = Callable[..., UEFL]
Replies = Callable[..., Reply]


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
    uefl: Build, site_reply: Replies, refresh: str, asked: list[str]
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
    uefl: Build, site_reply: Replies, threshold: str, uncertain: list[str]
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
    uefl: Build, site_reply: Replies, stop: bool, refresh: str
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
    uefl: Build, site_reply: Replies
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


def test_a_book_whose_users_all_failed_stays_as_it_was(uefl: Build, site_reply: Replies) -> None:
    replies = {"s1a": site_reply("s1a", {"w": [4.0], "codebook.0": book(9)})}
    after = state_after(uefl(), state(), replies)
    np.testing.assert_array_equal(after.arrays["codebook.1"], book(1))
    np.testing.assert_array_equal(after.arrays["codebook.0"], book(9))


def test_an_extension_adds_a_book_for_its_sites_and_changes_no_other(
    uefl: Build, site_reply: Replies
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
    uefl: Build, site_reply: Replies
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


def centroids(site_reply: Replies, site: str, *rows: tuple[list[float], int]) -> Reply:
    arrays = {
        "centroids": np.float32([centre for centre, _ in rows]),
        "counts": np.float32([count for _, count in rows]),
    }
    return site_reply(site, arrays, new_codewords=len(rows))


def test_the_first_book_is_laid_anew_by_the_certain_sites_features_weighted_by_count(
    uefl: Build, site_reply: Replies
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
    uefl: Build, site_reply: Replies
) -> None:
    after = extended(
        uefl(stop_when_certain=False), [], {"s1a": site_reply("s1a", NOTHING, new_codewords=0)}
    )
    assert same(after, state(4))
    assert (list(after.refreshed), after.extended) == ([], {})


def test_where_all_sites_are_certain_the_first_book_is_laid_anew_and_none_is_added(
    uefl: Build, site_reply: Replies
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
    uefl: Build, site_reply: Replies, sites: list[str]
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
    uefl: Build, site_reply: Replies, rows: int, counts: list[float], fits: bool
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
    uefl: Build, site_reply: Replies, own: dict[str, Any]
) -> None:
    asked = asked_in(uefl(**own), CENTROIDS, ["s1a"])
    assert asked is not None
    assert asked.metrics == ["new-codewords"]


def test_as_many_centroids_must_come_as_codewords_are_told(
    uefl: Build, site_reply: Replies
) -> None:
    arrays = {"centroids": np.zeros((1, 2), np.float32), "counts": np.ones(1, np.float32)}
    told = fault_in(uefl(), CENTROIDS, site_reply("s1a", arrays, new_codewords=2))
    assert told == "1 centroids came with counts [1.0]"


@pytest.mark.parametrize("own", [GAUSSIAN])
@pytest.mark.parametrize("number", [-1, 0.5, 5, 1e12, float("nan")])
def test_a_number_of_codewords_that_cannot_be_is_objected_to(
    uefl: Build, site_reply: Replies, own: dict[str, Any], number: float
) -> None:
    reply = site_reply("s1a", new_codewords=number)
    told = fault_in(uefl(**{"codes": 4, **own}), CENTROIDS, reply)
    assert told == f"it started {number:g} codewords, and 'uefl.codes' is 4"


@pytest.mark.parametrize("own", [{}, GAUSSIAN])
def test_a_round_without_any_new_codeword_is_marked_and_changes_nothing_else(
    uefl: Build, site_reply: Replies, own: dict[str, Any]
) -> None:
    strategy, before = uefl(**own), state(4)
    reply = site_reply("s1a", None if own else NOTHING, new_codewords=0)
    assert fault_in(strategy, CENTROIDS, reply) is None
    after = extended(strategy, ["s1a"], {"s1a": reply})
    assert same(after, before)
    assert (after.extended, after.access) == ({"5": []}, before.access)


def test_a_site_without_new_codewords_gets_no_book(uefl: Build, site_reply: Replies) -> None:
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
    with pytest.raises(
        SettingError, match=r"^site s2a has no validation samples.*'split.val-folds'"
    ):
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
    with pytest.raises(
        SettingError, match=r"'rounds' is 19, not more than 'uefl.iteration-rounds' \(20\)"
    ):
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
