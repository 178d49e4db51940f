from __future__ import annotations

import pytest

from models.errors import SettingError
from models.schema import Value, as_mapping, build, defaults, rule_of
from models.settings import CommonSettings, NoSettings
from models.uefl import UEFLSettings

ALL = (CommonSettings, UEFLSettings, NoSettings)


@pytest.mark.parametrize("cls", ALL)
def test_every_default_lies_within_its_own_range(cls: type) -> None:
    assert as_mapping(build(cls, defaults(cls))) == defaults(cls)


@pytest.mark.parametrize("cls", ALL)
def test_every_setting_says_what_it_means_in_one_line(cls: type) -> None:
    helps = [rule_of(cls, key).help for key in defaults(cls)]
    assert all(helps)
    assert not any("\n" in text for text in helps)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rounds", 0),
        ("silos", 0),
        ("seed", -1),
        ("batch-size", 1),  # batch norm has no variance over one image
        ("learning-rate", 0.0),
        ("dropout", 0.0),  # without dropout every Monte Carlo pass is the same
        ("dropout", 1.0),
        ("mc-passes", 0),
        ("network", "resnet"),
        ("pixel-scale", "unit"),
        ("precision", "fp16"),
        ("evaluate-every", -1),
        ("reply-timeout", 0.0),
    ],
)
def test_a_common_setting_without_sense_is_refused(key: str, value: Value) -> None:
    with pytest.raises(SettingError, match=f"'{key}'"):
        build(CommonSettings, {key: value})


def test_uefl_starts_from_the_weights_and_budget_of_the_paper() -> None:
    uefl = UEFLSettings()
    assert (uefl.codebook_weight, uefl.commitment_weight) == (1.0, 0.25)
    assert (uefl.gamma, uefl.codes, uefl.segments) == (0.3, 32, 1)
    assert (uefl.iteration_rounds, uefl.extension_rounds, uefl.max_iterations) == (20, 5, 3)
