import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.uefl import UEFLSite
from fedsilo.client_app.training.evaluation import tokens_of
from fedsilo.models.contract.errors import CheckpointError, SettingError
from fedsilo.models.contract.messages import ARRAYS, METRICS, Instruction
from fedsilo.models.maths.codebook import codebook_loss
from fedsilo.models.methods.uefl_books import gaussian_codebook
from fedsilo.models.methods.uefl_network import CodeUse, UEFLNetwork
from tests.support.lab import answer

Opened = Callable[..., Lab]
WIDTH = 16  # channels of a width-4 network
BOOK = gaussian_codebook(4, WIDTH, 7, 0).numpy()
PERSONAL = {"codebooks": "personal"}


@pytest.fixture
def shared(weights: dict[str, Any]) -> dict[str, Any]:
    return {**weights, "codebook.0": BOOK}


def test_a_site_uses_only_the_books_that_came(opened: Opened, shared: dict[str, Any]) -> None:
    assert set(opened("uefl", shared).open().codebooks) == {"0"}
    more = {**shared, "codebook.2": BOOK + 1, "codebook.10": BOOK + 2}
    network = opened("uefl", more).open()
    assert set(network.codebooks) == {"0", "2", "10"}
    expected = torch.from_numpy(np.concatenate([BOOK, BOOK + 1, BOOK + 2]))
    assert torch.equal(network.codebook(), expected)


def test_a_site_sends_back_what_it_was_sent_trained(opened: Opened, shared: dict[str, Any]) -> None:
    reply = answer(opened("uefl", shared))
    assert set(reply[ARRAYS]) == set(shared)
    assert not np.array_equal(reply[ARRAYS]["codebook.0"].numpy(), BOOK)
    assert reply[ARRAYS]["codebook.0"].numpy().shape == BOOK.shape


@pytest.mark.parametrize("change", ["missing", "surplus"])
def test_weights_that_do_not_fit_are_refused(
    opened: Opened, shared: dict[str, Any], change: str
) -> None:
    if change == "missing":
        del shared["head.4.bias"]
    else:
        shared["odd"] = BOOK
    with pytest.raises(SettingError, match=rf"do not fit the network: .*{change} \['"):
        answer(opened("uefl", shared))


def test_one_codeword_has_perplexity_one_and_the_tokens_own_mean_square(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("uefl", {**weights, "codebook.0": np.zeros((1, WIDTH), np.float32)})
    network = method.open()
    found = method.measured(network, "incoming", ("val",))
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
    weights = {"codebook_weight": 0.5, "commitment_weight": 2.0}
    network = opened("uefl", shared, own=weights).open()
    tokens = torch.randn(2, 3, WIDTH)
    use = CodeUse(network)
    with torch.no_grad():
        use.see(tokens)
    trained = codebook_loss(tokens, network.nearest(tokens).codewords, 0.5, 2.0)
    assert use.values()["codebook-loss"] == pytest.approx(float(trained), rel=1e-5)


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


@pytest.mark.parametrize("extra", [{}, {"codebook.1": BOOK + 1}])
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
    assert method.state_files.before(Instruction(2, "train")) is None


def own_books(method: UEFLSite, round_: int, step: int = 0) -> dict[str, torch.Tensor]:
    found = method.state_files.before(Instruction(round_, "train", step))
    assert found is not None
    return found


def test_personal_books_start_gaussian_and_are_kept_at_the_site(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("uefl", weights, own=PERSONAL)
    assert torch.equal(method.open().codebook(), torch.from_numpy(BOOK))
    reply = answer(method)
    assert set(reply[ARRAYS]) == set(weights)
    kept = own_books(method, 2)
    assert set(kept) == {"codebook.0"}
    assert not np.array_equal(kept["codebook.0"], BOOK)
    later = opened("uefl", weights, own=PERSONAL, round=2).open()
    assert torch.equal(later.codebook(), kept["codebook.0"])


def test_a_personal_extension_stays_at_the_site_and_is_used_in_the_next_round(
    opened: Opened, weights: dict[str, Any]
) -> None:
    answer(opened("uefl", weights, own=PERSONAL))
    method = opened("uefl", weights, own=PERSONAL, phase="centroids", step=2)
    before = method.open().codebook()
    reply = answer(method)
    assert ARRAYS not in reply
    assert reply[METRICS]["new-codewords"] == 4
    assert reply[METRICS]["kept-state"] == 1
    assert set(own_books(method, 2)) == {"codebook.0", "codebook.1"}
    later = cast(UEFLNetwork, opened("uefl", weights, own=PERSONAL, round=2).open())
    assert later.codebook().shape == (8, WIDTH)
    assert torch.equal(later.codebook()[:4], before)
    other = opened("uefl", weights, own=PERSONAL, site="s2a", round=2).open()
    assert other.codebook().shape == (4, WIDTH)


def test_a_personal_site_without_a_large_enough_cluster_adds_no_book(
    opened: Opened, weights: dict[str, Any]
) -> None:
    own = {**PERSONAL, "centroid_min_count": 36 * 4 + 1}
    answer(opened("uefl", weights, own=own))
    method = opened("uefl", weights, own=own, phase="centroids", step=2)
    assert answer(method)[METRICS]["new-codewords"] == 0
    assert set(own_books(method, 2)) == {"codebook.0"}


def test_personal_books_that_are_gone_are_an_error_and_not_a_fresh_start(
    opened: Opened, weights: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match="site s1a is gone from"):
        answer(opened("uefl", weights, own=PERSONAL, round=2, expects_state=True))


def test_a_gaussian_start_of_a_personal_book_is_drawn_at_the_site(
    opened: Opened, weights: dict[str, Any]
) -> None:
    own = {**PERSONAL, "codeword_start": "gaussian"}
    answer(opened("uefl", weights, own=own))
    reply = answer(opened("uefl", weights, own=own, phase="centroids", step=2))
    assert ARRAYS not in reply
    drawn = own_books(opened("uefl", weights, own=own), 2)["codebook.1"]
    assert torch.equal(drawn, gaussian_codebook(4, WIDTH, 7, 1))
    assert not np.array_equal(drawn, BOOK)


@pytest.mark.parametrize("start", ["kmeans", "gaussian"])
@pytest.mark.parametrize(("used", "kept"), [("newest", "02"), ("all", "012")])
def test_a_personal_site_that_reads_the_newest_book_keeps_the_first_and_that_one(
    opened: Opened, weights: dict[str, Any], start: str, used: str, kept: str
) -> None:
    own = {**PERSONAL, "codeword_start": start, "books_used": used}
    for round_ in (1, 2):
        answer(opened("uefl", weights, own=own, round=round_))
        answer(opened("uefl", weights, own=own, round=round_, phase="centroids", step=2))
    books = own_books(opened("uefl", weights, own=own), 3)
    assert set(books) == {f"codebook.{number}" for number in kept}


REFRESH = {"phase": "centroids", "step": 2, "notes": {"refreshes": True}}


def test_a_certain_site_lays_the_first_book_by_k_means_even_where_new_ones_start_gaussian(
    opened: Opened, shared: dict[str, Any]
) -> None:
    own = {"codeword_start": "gaussian"}
    centres, counts = centroids_of(opened("uefl", shared, own=own, **REFRESH))
    drawn, _ = centroids_of(opened("uefl", shared, phase="centroids", step=2))
    np.testing.assert_array_equal(centres, drawn)
    assert counts.sum() == 36 * 4


def test_a_certain_site_lays_its_own_first_book_anew_and_keeps_the_others(
    opened: Opened, weights: dict[str, Any]
) -> None:
    answer(opened("uefl", weights, own=PERSONAL))
    answer(opened("uefl", weights, own=PERSONAL, phase="centroids", step=2))
    before = own_books(opened("uefl", weights, own=PERSONAL), 2)
    later = {**REFRESH, "round": 2}
    reply = answer(opened("uefl", weights, own=PERSONAL, **later))
    assert ARRAYS not in reply
    assert reply[METRICS]["new-codewords"] == 4
    kept = own_books(opened("uefl", weights, own=PERSONAL), 3)
    assert set(kept) == {"codebook.0", "codebook.1"}
    assert torch.equal(kept["codebook.1"], before["codebook.1"])
    assert not torch.equal(kept["codebook.0"], before["codebook.0"])
    laid, _ = centroids_of(
        opened("uefl", {**weights, "codebook.0": BOOK}, **later)
    )  # the same features, of which another book changes nothing
    np.testing.assert_array_equal(kept["codebook.0"], laid)


def test_an_evidential_head_is_asked_for_its_vacuity_beside_the_code_use(
    opened: Opened, shared: dict[str, Any]
) -> None:
    lab = opened("uefl", shared, own={"loss": "evidential"})
    found = lab.measured(lab.open(), "incoming", ("test",))
    assert {"incoming.test.vacuity", "incoming.test.perplexity"} <= found.keys()
