from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedsilo.models.contract.errors import SettingError, SiteError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.gaussian_mechanism import check_privacy_settings, clip_and_noise


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clipped(values: dict[str, Tensor], came: dict[str, Tensor], clip: float) -> dict[str, Tensor]:
    return clip_and_noise(values, came, clip, 0.0, draw())


def test_a_vector_of_norm_5_is_cut_to_norm_1() -> None:
    found = clipped({"w": torch.tensor([3.0, 4.0])}, {}, 1.0)
    assert found["w"].tolist() == pytest.approx([0.6, 0.8], abs=1e-15)


def test_all_arrays_of_a_message_share_one_norm() -> None:
    found = clipped({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}, {}, 1.0)
    assert found["a"].tolist() == pytest.approx([0.6])
    assert found["b"].tolist() == [[pytest.approx(0.8)]]


def test_clipping_of_a_received_array_clips_the_difference() -> None:
    came = {"w": torch.tensor([10.0, 20.0]), "unasked": torch.ones(3)}
    found = clipped({"w": torch.tensor([13.0, 24.0])}, came, 1.0)
    assert found.keys() == {"w"}
    assert found["w"].tolist() == pytest.approx([10.6, 20.8])


def test_clipping_ignores_a_reference_of_another_shape() -> None:
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


def test_noise_without_a_generator_is_standard_normal_and_never_repeats() -> None:
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
def test_clipping_of_values_that_are_not_finite_raises(bad: float) -> None:
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
def test_clipped_message_is_within_c_of_its_reference(
    values: list[float], came: list[float], more: list[float], clip: float
) -> None:
    arrays = {"w": torch.tensor(values), "v": torch.tensor(more)}
    origin = {"w": torch.tensor(came[: len(values)])}
    found = clipped(arrays, origin, clip)
    told = torch.cat([found["w"] - origin["w"].double(), found["v"]])
    # The difference of numbers up to 1e6 in float64 is known to 1e-9
    assert told.norm().item() <= clip * (1 + 1e-9) + 1e-8


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
