from typing import Any

import pytest

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.privacy.promises import check_privacy_settings, statistics_noise
from tests.support.errors import refuses

PRIVATE: dict[str, Any] = {"sample_clip_norm": 1.0, "noise_multiplier": 2.0}
SECURE: dict[str, Any] = {"secure_aggregation": "secagg", "clip_norm": 1.0}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        PRIVATE,
        {**PRIVATE, "trust": "nobody", "max_epsilon": 3.0, "delta": 1e-4},
        {**PRIVATE, "statistics_noise": 9.0},
        SECURE,
        {**SECURE, **PRIVATE},
        {**SECURE, "trust": "sums"},
    ],
)
def test_settings_that_fit_together_pass(settings: dict[str, Any]) -> None:
    check_privacy_settings(CommonSettings(method="fedavg", **settings))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"sample_clip_norm": 1.0},
            "'privacy.sample-clip-norm' is 1 and 'privacy.noise-multiplier' is 0: diff",
        ),
        (
            {"noise_multiplier": 1.0},
            "'privacy.sample-clip-norm' is 0 and 'privacy.noise-multiplier' is 1: diff",
        ),
        (
            {"max_epsilon": 1.0},
            "'privacy.max-epsilon' is 1, but there is no epsilon without",
        ),
        ({"delta": 1e-3}, "'privacy.delta' is 0.001, but there is no epsilon without"),
        (
            {"statistics_noise": 1.0},
            "'privacy.statistics-noise' is 1, but there is no epsilon without",
        ),
        ({"trust": "nobody"}, "'privacy.trust' is 'nobody', but 'privacy.sample-clip-norm' is 0"),
        ({"trust": "sums"}, "'privacy.trust' is 'sums', but 'secure.aggregation' is 'none'"),
        ({"secure_aggregation": "secagg"}, "'secure.clip-norm' must be above 0"),
        ({**SECURE, "aggregation": "median"}, "a sum gives the mean only"),
        ({**PRIVATE, "method": "mix"}, "method 'mix' pools the data of all sites"),
        ({**PRIVATE, "method": "fedaligncl"}, "sends embeddings of single images"),
        ({**PRIVATE, "epoch_steps": 10}, "'train.epoch-steps' is set"),
        ({**PRIVATE, "gradient_checkpointing": True}, "'network.gradient-checkpointing' is set"),
    ],
)
def test_settings_that_break_a_promise_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError) as caught:
        check_privacy_settings(CommonSettings(**{"method": "fedavg", **settings}))
    assert said in str(caught.value)


@pytest.mark.parametrize("standardise", ["pooled", "site"])
def test_a_private_table_is_scaled_by_declared_statistics_alone(standardise: str) -> None:
    common = CommonSettings(method="fedavg", standardise=standardise, **PRIVATE)
    with refuses(SettingError, "standardise", "declared"):
        check_privacy_settings(common, table=True)
    check_privacy_settings(common)


def test_statistics_have_the_noise_of_steps_unless_they_have_their_own() -> None:
    assert statistics_noise(CommonSettings(noise_multiplier=2.0)) == 2.0
    assert statistics_noise(CommonSettings(noise_multiplier=2.0, statistics_noise=5.0)) == 5.0
