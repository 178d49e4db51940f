"""What each level of trust gives away, by attacks that work where the server is trusted."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedsilo.core.methods import METHODS, why_not_private
from fedsilo.models.privacy import rounded_gaussian
from tests.support.attackers.asked import Asked
from tests.support.attackers.attacks import ATTACKS, PLANES, attacked
from tests.support.attackers.planes import FEATURES, NO_WEIGHTS, WAYS, planes
from tests.support.same_sites import one_of_each_site

HONEST = "inversion of honest weights, fedavg"
MEAN_IMAGES = "images by class means, fedproto"
REFUSED = ["centroids, uefl"]  # where nobody is trusted
# Messages, and the rows that are read in them where the server is trusted
READ = {
    "class means, fedproto": (1, 15),
    "mean logits, feddistill": (14, 1),
    "centroids, uefl": (40, 5),
    "images by planes, fedavg": (1, 3),
    MEAN_IMAGES: (3, 1),
    HONEST: (1, 1),
}
SEEDS = {"mean logits, feddistill": 1}  # of the attacker: its two planes have a row between them
SLOW = {HONEST, MEAN_IMAGES}
DEVIATIONS = (0.25, 0.5, 0.75, 1.0)  # of who guesses rows


@pytest.fixture(autouse=True)
def _same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a hospital's noise and order, which are the operating system's, the same bits each time.

    So a test of a few messages passes each time that it is run.
    """
    source = np.random.default_rng(53)
    seeded = partial(rounded_gaussian.exact_normals, random_bytes=source.bytes)
    monkeypatch.setattr(rounded_gaussian, "exact_normals", seeded)
    monkeypatch.setattr("secrets.randbits", lambda bits: int(source.integers(2**bits)))


def in_soak(names: list[str], slow: set[str]) -> list[object]:
    """Return parameters of which some run in ``make test-soak`` alone."""
    return [pytest.param(n, marks=pytest.mark.soak) if n in slow else n for n in names]


def test_every_method_is_attacked_or_there_is_a_reason_why_not() -> None:
    assert WAYS.keys() | NO_WEIGHTS.keys() == METHODS.keys()
    assert not WAYS.keys() & NO_WEIGHTS.keys()


@pytest.mark.parametrize("attack", one_of_each_site(sorted(PLANES)))
def test_a_trusted_server_reads_rows_by_every_method_that_sends_weights(
    attack: str, tmp_path: Path
) -> None:
    site = attacked(attack, 0.0, tmp_path, 1)
    assert site.answered == site.messages, site.hospital.refusals
    assert site.hospital.recovered(site.candidates) >= 15


@pytest.mark.parametrize("attack", sorted(READ))
def test_a_trusted_server_that_breaks_the_trust_reads_rows(attack: str, tmp_path: Path) -> None:
    messages, rows = READ[attack]
    found = []
    for number in range(3):  # a hospital's batches are random: an inversion may find no row in one
        (folder := tmp_path / str(number)).mkdir()
        site = attacked(attack, 0.0, folder, messages, SEEDS.get(attack, 0))
        assert site.answered == site.messages, "nothing of it is refused"
        found.append(site.hospital.recovered(site.candidates))
        if found[-1] >= rows:
            return
    pytest.fail(f"an attacker recovered {found} rows, in no attempt {rows}")


@pytest.mark.parametrize("attack", one_of_each_site(sorted(PLANES)))
def test_where_nobody_is_trusted_no_method_gives_a_row_away(attack: str, tmp_path: Path) -> None:
    """At a budget of 64, which promises little."""
    site = attacked(attack, 64.0, tmp_path, 1)
    if reason := why_not_private(ATTACKS[attack].method):
        assert site.answered == 0
        assert reason in site.hospital.refusals[0]
        return
    assert site.answered == site.messages, site.hospital.refusals
    no_nearer_than_a_guess(site)


@pytest.mark.parametrize("attack", in_soak(sorted(set(READ) - set(REFUSED)), SLOW))
def test_where_nobody_is_trusted_no_row_is_nearer_than_a_guess(attack: str, tmp_path: Path) -> None:
    site = attacked(attack, 8.0, tmp_path, READ[attack][0], SEEDS.get(attack, 0))
    assert site.answered == site.messages, "the budget allows it, and it does not help"
    no_nearer_than_a_guess(site)


def test_where_nobody_is_trusted_there_are_no_centroids(tmp_path: Path) -> None:
    site = attacked("centroids, uefl", 64.0, tmp_path, 2)
    assert site.answered == 0
    # Once the data are open, a hospital gives its reason only to its own log
    assert "this site could not answer" in site.hospital.refusals[0]


def no_nearer_than_a_guess(site: Asked) -> None:
    """Check that who knows nothing but that features are standardised guesses as well.

    Candidates are quotients of noise, of which many are near 0, the mean of standardised rows: near
    the mean one guesses better than by rows of deviation 1. So the best of several deviations is
    the measure.
    """
    rows = site.hospital.rows()
    assert site.hospital.recovered(site.candidates) == 0
    draws = np.random.default_rng(1).normal(size=(len(site.candidates), rows.shape[1]))
    guessed = [np.median(site.hospital.nearest(deviation * draws)) for deviation in DEVIATIONS]
    assert np.median(site.hospital.nearest(site.candidates)) >= 0.95 * min(guessed)


def test_rows_that_are_known_but_for_noise_are_nearer_than_a_guess(tmp_path: Path) -> None:
    site = attacked("planes, fedavg", 8.0, tmp_path, 1)
    rows = site.hospital.rows()
    site.candidates = list(rows + np.random.default_rng(2).normal(scale=0.4, size=rows.shape))
    with pytest.raises(AssertionError):
        no_nearer_than_a_guess(site)


def test_messages_beyond_the_budget_are_all_refused(tmp_path: Path) -> None:
    site = attacked("planes, fedavg", 1.0, tmp_path, 6)
    arrays = planes(np.eye(FEATURES)[0], 0)
    asked = [
        site.hospital.train(arrays, round=number % 10 + 1, run_name=f"again{number // 10}")
        for number in range(30)
    ]
    assert asked == [None] * 30
    assert "epsilon is spent: all runs have spent" in site.hospital.refusals[0]
