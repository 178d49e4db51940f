"""Whole runs of UEFL over real sites, every message looked at."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.uefl import UEFLSettings
from fedsilo.models.methods.uefl_books import gaussian_codebook
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.methods.uefl import CENTROIDS, UEFL, UNCERTAINTY

Run = Callable[..., tuple[Any, Any]]
Tiny = Callable[..., dict[str, Any]]


def books(content: RecordDict) -> set[str]:
    record = content.array_records.get(ARRAYS, {})
    return {name.removeprefix("codebook.") for name in record if name.startswith("codebook.")}


def test_a_site_never_receives_nor_sends_a_book_it_was_not_given(
    spied_run: Run, tiny: Tiny, recorder: Any, told: Any
) -> None:
    grid, strategy = spied_run(tiny("uefl", rounds=4), [recorder])
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
    spied_run: Run, tiny: Tiny, recorder: Any
) -> None:
    _, strategy = spied_run(tiny("uefl", rounds=2, refresh="none"), [recorder])
    (check,) = strategy.state.entropies
    least = min(check["entropies"].values())
    assert check["uncertain"] == sorted(s for s, e in check["entropies"].items() if e > least)
    assert (1, UNCERTAINTY, ["s1a", "s2a", "s3a"]) in recorder.phases
    assert [p for p in recorder.phases if p[1] == CENTROIDS] == [(1, CENTROIDS, check["uncertain"])]
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
    spied_run: Run, tiny: Tiny
) -> None:
    grid, _ = spied_run(tiny("uefl"))
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
    spied_run: Run, tiny: Tiny, recorder: Any
) -> None:
    grid, strategy = spied_run(tiny("uefl", rounds=3), [recorder])
    assert strategy.state.refreshed == [1, 2]
    uncertain = {c["round"]: c["uncertain"] for c in strategy.state.entropies}
    site_of = {node: site for site, node in strategy.method.participants.nodes.items()}
    for message in grid.sent[3:]:
        told = message.content["config"]
        if told["phase"] == CENTROIDS:
            certain = site_of[message.metadata.dst_node_id] not in uncertain[told["round"]]
            assert told["note.refreshes"] is certain
    plain, _ = spied_run(tiny("uefl", rounds=3, refresh="none"))
    sent = [m for m in grid.sent[3:] if m.content["config"]["round"] == 2]
    unlaid = [m for m in plain.sent[3:] if m.content["config"]["round"] == 2]
    first, unchanged = (m[0].content[ARRAYS]["codebook.0"].numpy() for m in (sent, unlaid))
    assert first.shape == unchanged.shape == (4, 16)
    assert not np.array_equal(first, unchanged)
