import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.uefl import UEFLSite
from fedsilo.client_app.training.evaluation import tokens_of
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS, METRICS, Instruction
from fedsilo.models.maths.codebook import codebook_loss
from fedsilo.models.methods.uefl_books import gaussian_codebook
from fedsilo.models.methods.uefl_network import CodeUse
from tests.support.lab import answer

Opened = Callable[..., Lab]
WIDTH = 16  # channels of a width-4 network
BOOK = gaussian_codebook(4, WIDTH, 7, 0).numpy()


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
    network = opened("uefl", shared).open()
    tokens = torch.randn(2, 3, WIDTH)
    use = CodeUse(network)
    with torch.no_grad():
        use.see(tokens)
    trained = codebook_loss(tokens, network.nearest(tokens).codewords, 1.0, 0.25)
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
    found = lab.measured(lab.open(), "incoming", ("test",))
    assert {"incoming.test.vacuity", "incoming.test.perplexity"} <= found.keys()
