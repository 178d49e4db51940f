import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.privacy.secure_sum import (
    MaskStream,
    Quantisation,
    mask_arrays,
    needed_sites,
    quantisation,
    tolerated_colluders,
    weigh_site,
    why_too_coarse,
)
from tests.support.errors import refuses

KEYS = {name: bytes([place] * 32) for place, name in enumerate(("a", "b", "c", "ab", "ac", "bc"))}


def settings(**changes: Any) -> CommonSettings:
    return CommonSettings(clip_norm=2.0, secure_aggregation="secagg", **changes)


def test_two_numbers_of_three_sites_by_hand() -> None:
    way = Quantisation(2.0, 2)  # -2, -2/3, 2/3, 2
    assert way.step == pytest.approx(4 / 3)
    whole = [way.quantise(np.array(values)) for values in ([2.0, -2.0], [0.6, 0.0], [-0.7, 9.0])]
    assert [list(part) for part in whole] == [[3, 0], [2, 2], [1, 3]]
    sums = np.sum(whole, axis=0, dtype=np.uint32)
    assert list(sums) == [6, 5]
    assert way.total(sums, 3) == pytest.approx([2.0, 2 / 3])


def test_masks_of_three_sites_go_out_of_their_sum() -> None:
    values = {"a": [1, 2], "b": [10, 20], "c": [100, 200]}
    pairs: dict[str, tuple[list[str], list[str]]] = {
        "a": (["a", "ab", "ac"], []),
        "b": (["b", "bc"], ["ab"]),
        "c": (["c"], ["ac", "bc"]),
    }
    total: Any = np.zeros(2, np.uint32)
    for site, (plus, minus) in pairs.items():
        sent = mask_arrays(
            {"w": np.array(values[site], np.uint32)},
            [KEYS[name] for name in plus],
            [KEYS[name] for name in minus],
        )["w"]
        assert (sent > 10**4).all(), "what leaves looks like no small number"
        total = total + sent
    own = [KEYS["a"], KEYS["b"], KEYS["c"]]
    assert list(mask_arrays({"w": total}, [], own)["w"]) == [111, 222]


def test_a_mask_runs_on_through_arrays_by_name_and_is_drawn_evenly() -> None:
    whole = MaskStream(KEYS["ab"]).words((6,))
    parts = mask_arrays(
        {"b": np.zeros(4, np.uint32), "a": np.zeros((2, 1), np.uint32)}, [KEYS["ab"]]
    )
    assert list(parts["a"].ravel()) + list(parts["b"]) == list(whole)
    drawn = MaskStream(KEYS["ac"]).words((100, 1000))
    assert drawn.shape == (100, 1000)
    octants = Counter((drawn >> 29).ravel().tolist())
    expected = drawn.size / 8
    deviation = math.sqrt(expected * 7 / 8)
    assert all(abs(octants[octant] - expected) < 5 * deviation for octant in range(8))
    with pytest.raises(ValueError, match="32 bytes, not 4"):
        MaskStream(b"four")


@given(st.lists(st.lists(st.floats(-2, 2), min_size=3, max_size=3), min_size=3, max_size=9))
def test_a_sum_is_the_plain_one_within_half_a_step_a_site(values: list[list[float]]) -> None:
    way = quantisation(settings(), len(values))
    sums = np.sum([way.quantise(np.array(row)) for row in values], axis=0, dtype=np.uint32)
    plain = np.sum(values, axis=0)
    error = np.abs(way.total(sums, len(values)) - plain)
    assert (error <= len(values) * way.step / 2 + 1e-9).all()


@given(st.lists(st.floats(width=32), min_size=1, max_size=9))
def test_whatever_is_not_finite_counts_as_0(values: list[float]) -> None:
    """The cast of a nan to an integer is undefined: on this processor it was 2^31 or 0."""
    way = quantisation(settings(), 3)
    finite = [value if math.isfinite(value) else 0.0 for value in values]
    assert (way.quantise(np.array(values)) == way.quantise(np.array(finite))).all()


def test_as_many_bits_as_the_sum_has_room_for() -> None:
    assert quantisation(settings(), 3).bits == 30
    assert quantisation(settings(), 4).bits == 30
    assert quantisation(settings(), 5).bits == 29
    largest = quantisation(settings(), 5)
    assert 5 * int(largest.quantise(np.array([2.0]))[0]) < 2**32


def test_why_too_coarse_grows_with_the_bound_on_samples() -> None:
    # 4 / (2^30 - 1) * 16384 / 75 * sqrt(3 * 1e6 / 12) = 4.07e-4, and 0.02 is allowed
    way = quantisation(settings(), 3)
    assert why_too_coarse(10**6, way, 3, 75) is None
    fault = why_too_coarse(10**6, way, 3, 1)  # 75 times fewer samples
    assert fault is not None
    assert "moves the mean by 0.0305" in fault
    assert "lower 'secure-samples' in all site files" in fault
    assert why_too_coarse(10**6, quantisation(settings(), 3, 1000), 3, 1) is None  # the fix


def test_weight_is_a_site_s_share_of_the_most_samples() -> None:
    way = quantisation(settings(), 3, 200)
    assert weigh_site(way, 50) == 0.25
    assert weigh_site(way, 201) == 1, "a refusal would tell its number"


def test_samples_of_all_sites_fit_into_a_word() -> None:
    with refuses(SettingError, 4, 2, 32):
        quantisation(settings(), 4, 2**30)
    assert quantisation(settings(), 4, 2**30 - 1).bits == 30


def test_a_threshold_is_more_than_half_of_at_least_three() -> None:
    assert [needed_sites(settings(), sites) for sites in (3, 4, 5, 6, 9)] == [3, 3, 4, 5, 7]
    assert needed_sites(settings(secure_threshold=5), 6) == 5
    for wrong in (3, 7):
        with pytest.raises(SettingError, match=f"from 4 to 6 for 6 sites, but is {wrong}"):
            needed_sites(settings(secure_threshold=wrong), 6)
    with pytest.raises(SettingError, match="at least three sites, but there are 2"):
        needed_sites(settings(), 2)


def test_tolerated_sites_are_those_of_theorem_6_5() -> None:
    assert [tolerated_colluders(t, 6) for t in (4, 5, 6)] == [1, 3, 4]  # 2t - n - 1, at most t - 2
    assert [tolerated_colluders(3, n) for n in (3, 4, 5)] == [1, 1, 0]
