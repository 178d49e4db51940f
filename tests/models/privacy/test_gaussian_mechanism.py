from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm
from torch import Tensor

from models.contract.errors import SettingError, SiteError
from models.contract.settings import CommonSettings
from models.privacy.gaussian_mechanism import (
    check_privacy_settings,
    clip_and_noise,
    epsilon,
    epsilon_of_a_change,
)

DELTA = 1e-5


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clipped(values: dict[str, Tensor], came: dict[str, Tensor], clip: float) -> dict[str, Tensor]:
    return clip_and_noise(values, came, clip, 0.0, draw())


def closed_form(z: float, releases: int) -> float:
    """Return the bound of Gaussians: Rényi divergence a T / (2 z²), the least over all orders."""

    def bound(order: float) -> float:
        rest = math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1)
        return order * releases / (2 * z * z) + rest

    return float(minimize_scalar(bound, bounds=(1.0001, 1e5), method="bounded").fun)


def exact(z: float, releases: int) -> float:
    """Return Balle and Wang's epsilon (2018): T Gaussians are one of mu = sqrt(T) / z."""
    mu = math.sqrt(releases) / z

    def excess(eps: float) -> float:
        far = math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))
        return float(norm.cdf(mu / 2 - eps / mu) - far - DELTA)

    return float(brentq(excess, 0, mu * mu + 20 * mu))


def test_a_vector_of_norm_5_is_cut_to_norm_1() -> None:
    found = clipped({"w": torch.tensor([3.0, 4.0])}, {}, 1.0)
    assert found["w"].tolist() == pytest.approx([0.6, 0.8], abs=1e-15)


def test_all_arrays_of_a_message_share_one_norm() -> None:
    found = clipped({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}, {}, 1.0)
    assert found["a"].tolist() == pytest.approx([0.6])
    assert found["b"].tolist() == [[pytest.approx(0.8)]]


def test_of_an_array_that_came_the_difference_is_clipped() -> None:
    came = {"w": torch.tensor([10.0, 20.0]), "unasked": torch.ones(3)}
    found = clipped({"w": torch.tensor([13.0, 24.0])}, came, 1.0)
    assert found.keys() == {"w"}
    assert found["w"].tolist() == pytest.approx([10.6, 20.8])


def test_what_came_in_another_shape_is_no_reference() -> None:
    found = clipped({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([[3.0, 4.0]])}, 1.0)
    assert found["w"].tolist() == pytest.approx([0.6, 0.8])


def test_a_small_update_leaves_exactly_as_it_is() -> None:
    value, came = torch.randn(50, generator=draw()), torch.randn(50, generator=draw(1))
    near = came + 0.01 * value
    assert torch.equal(clipped({"w": near}, {"w": came}, 1.0)["w"].float(), near)


def test_the_noise_is_z_times_c_on_every_coordinate_of_every_array() -> None:
    values = {"a": torch.zeros(20_000), "b": torch.zeros(100, 200), "c": torch.full((9,), 7.0)}
    found = clip_and_noise(values, values, 0.5, 3.0, draw())
    noise = [found["a"], found["b"].flatten()]
    for one in noise:
        assert one.std().item() == pytest.approx(1.5, rel=0.02)
        assert one.mean().item() == pytest.approx(0, abs=0.04)
    assert abs(torch.corrcoef(torch.stack(noise))[0, 1].item()) < 0.03
    assert (found["c"] != 7).all()


def test_secret_noise_is_standard_normal_and_never_the_same() -> None:
    values = {"a": torch.zeros(200, 500), "none": torch.zeros(0, 3)}
    first, second = (clip_and_noise(values, {}, 2.0, 0.5, None)["a"] for _ in range(2))
    assert first.shape == (200, 500)
    assert first.std().item() == pytest.approx(1, rel=0.02)
    assert first.mean().item() == pytest.approx(0, abs=0.02)
    assert (first**4).mean().item() == pytest.approx(3, rel=0.05)
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.02


def test_the_same_generator_gives_the_same_noise() -> None:
    values = {"b": torch.ones(4), "a": torch.ones(3)}
    first, again = (clip_and_noise(values, {}, 1.0, 1.0, draw(3)) for _ in range(2))
    backwards = clip_and_noise(dict(reversed(values.items())), {}, 1.0, 1.0, draw(3))
    assert all(torch.equal(first[name], again[name]) for name in values)
    assert all(torch.equal(first[name], backwards[name]) for name in values)


def test_a_variance_is_not_negative_and_counts_are_counts() -> None:
    values = {"norm.running_var": torch.zeros(500), "counts": torch.tensor([5, 0, 30])}
    found = clip_and_noise(values, {}, 1.0, 4.0, draw())
    assert found["norm.running_var"].min() == 0
    assert found["norm.running_var"].max() > 0
    assert (found["counts"] >= 1).all()
    assert torch.equal(found["counts"], found["counts"].round())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_norm(bad: float) -> None:
    good, odd = torch.tensor([3.0, 4.0]), torch.tensor([bad, 0.0])
    for values, came in (({"w": odd}, {}), ({"w": good}, {"w": odd})):
        with pytest.raises(SiteError, match="not finite"):
            clipped(values, came, 1.0)


floats = st.floats(-1e6, 1e6, width=32)


@given(
    values=st.lists(floats, min_size=1, max_size=6),
    came=st.lists(floats, min_size=6, max_size=6),
    more=st.lists(floats, min_size=1, max_size=3),
    clip=st.floats(1e-3, 1e3),
)
def test_no_message_tells_more_than_c(
    values: list[float], came: list[float], more: list[float], clip: float
) -> None:
    arrays = {"w": torch.tensor(values), "v": torch.tensor(more)}
    origin = {"w": torch.tensor(came[: len(values)])}
    found = clipped(arrays, origin, clip)
    told = torch.cat([found["w"] - origin["w"].double(), found["v"]])
    # The difference of numbers up to 1e6 in float64 is known to 1e-9
    assert told.norm().item() <= clip * (1 + 1e-9) + 1e-8


@pytest.mark.parametrize(("z", "releases"), [(6.0, 100), (1.0, 1), (0.5, 4), (40.0, 3), (3.0, 100)])
def test_the_accountant_agrees_with_its_closed_form_and_is_above_the_exact_one(
    z: float, releases: int
) -> None:
    found = epsilon(z, releases, DELTA)
    assert found == pytest.approx(closed_form(z, releases), rel=0.01)
    assert exact(z, releases) <= found <= 1.25 * exact(z, releases)


def test_six_times_the_norm_over_a_hundred_rounds_is_epsilon_8() -> None:
    assert exact(6.0, 100) == pytest.approx(8.0, abs=0.05)
    assert 8.0 <= epsilon(6.0, 100, DELTA) <= 8.7
    assert epsilon_of_a_change(12.0, 100, DELTA) == epsilon(6.0, 100, DELTA)


def test_a_variance_of_a_thousandth_hides_nothing() -> None:
    z = math.sqrt(0.001)
    assert exact(z, 1) == pytest.approx(634, rel=0.01)
    assert exact(z, 100) == pytest.approx(51_000, rel=0.01)
    assert epsilon(z, 1, DELTA) == pytest.approx(634, rel=0.03)
    assert epsilon(z, 100, DELTA) == pytest.approx(51_000, rel=0.03)


def test_the_table_of_the_docs_is_what_the_accountant_says() -> None:
    text = (Path(__file__).parents[3] / "docs" / "privacy.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| (.* / .*) \|$", text, re.MULTILINE)
    assert [float(z) for z, _ in rows] == [0.5, 1, 2, 4, 6, 12]
    for z, cells in rows:
        pairs = [
            f"{epsilon(float(z), n, DELTA):.3g} / {epsilon_of_a_change(float(z), n, DELTA):.3g}"
            for n in (1, 10, 30, 100)
        ]
        assert cells.split(" | ") == pairs


def test_nothing_sent_is_nothing_spent_and_no_noise_is_everything() -> None:
    assert epsilon(1.0, 0, DELTA) == epsilon(0.0, 0, DELTA) == 0
    assert epsilon(0.0, 1, DELTA) == math.inf
    assert epsilon(1.0, 2, DELTA) > epsilon(1.0, 1, DELTA) > epsilon(1.0, 1, 1e-3) > 0


@pytest.mark.parametrize(
    ("changes", "table", "said"),
    [
        ({"clip_norm": 1.0}, False, "'noise-multiplier' is 0: differential privacy needs both"),
        ({"noise_multiplier": 1.0}, False, "'clip-norm' is 0 and 'noise-multiplier' is 1"),
        ({"max_epsilon": 3.0}, False, "'max-epsilon' is 3 and 'clip-norm' is 0"),
        ({"delta": 1e-6}, False, "'delta' is 1e-06 and 'clip-norm' is 0"),
        ({"clip_norm": 1.0, "noise_multiplier": 1.0}, True, "set 'standardise' to 'declared' or"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    changes: dict[str, Any], table: bool, said: str
) -> None:
    with pytest.raises(SettingError, match=said):
        check_privacy_settings(CommonSettings(**changes), table)


@pytest.mark.parametrize("standardise", ["declared", "site"])
def test_settings_that_agree_are_taken(standardise: str) -> None:
    check_privacy_settings(CommonSettings(), table=True)
    private = CommonSettings(
        clip_norm=1.0, noise_multiplier=6.0, delta=1e-6, max_epsilon=8.0, standardise=standardise
    )
    check_privacy_settings(private, table=True)
    check_privacy_settings(CommonSettings(clip_norm=1.0, noise_multiplier=6.0))
