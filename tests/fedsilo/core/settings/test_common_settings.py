import pytest

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.core.settings_schema import Value, as_mapping, build, defaults, rule_of
from fedsilo.models.methods.uefl import UEFLSettings

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
        ("split.silos", 0),
        ("seed", -1),
        ("train.batch-size", 1),  # batch norm has no variance over one image
        ("train.learning-rate", 0.0),
        ("network.dropout", -0.1),
        ("network.dropout", 1.0),
        ("train.mc-passes", -1),
        ("network.name", "resnet"),
        ("data.pixel-scale", "unit"),
        ("data.standardise", "none"),
        ("privacy.sums-min-count", 0),
        ("split.test-folds", -1),
        ("split.val-fold", -1),
        ("machine.precision", "fp8"),
        ("server.evaluate-every", -1),
        ("run.reply-timeout", 0.0),
    ],
)
def test_a_common_setting_without_sense_is_refused(key: str, value: Value) -> None:
    with pytest.raises(SettingError, match=f"'{key}'"):
        build(CommonSettings, {key: value})


@pytest.mark.parametrize(
    ("key", "field"), [("network.dropout", "dropout"), ("train.mc-passes", "mc_passes")]
)
def test_a_run_may_do_without_dropout_or_passes(key: str, field: str) -> None:
    assert getattr(build(CommonSettings, {key: 0}), field) == 0


def test_uefl_starts_from_the_weights_and_budget_of_the_paper() -> None:
    uefl = UEFLSettings()
    assert (uefl.gamma, uefl.codes, uefl.segments) == (0.3, 32, 1)
    assert (uefl.iteration_rounds, uefl.extension_rounds, uefl.max_iterations) == (20, 5, 3)
