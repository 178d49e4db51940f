"""Tables 1 and 2 of the FedEvPrompt paper: what is published, and for which runs."""

from typing import Any

import pytest

from fedsilo.core.methods import settings_class
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping
from fedsilo.runs.published.published_numbers import Numbers, published_numbers
from tests.support.tiny import DERMOSCOPY

SITES = ("bcn", "msk4", "rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")


def published(
    method: str, own: dict[str, Any], sites: tuple[str, ...] = SITES, **common: Any
) -> Numbers:
    settings = CommonSettings(**DERMOSCOPY | {"method": method} | common)
    values = as_mapping(settings) | as_mapping(settings_class(method)(**own))
    return published_numbers(values, sites).numbers


@pytest.mark.parametrize(
    ("common", "own", "mean"),
    [
        ({}, {}, 77.26),
        ({}, {"buffer_selection": "random"}, 75.17),
        ({}, {"distillation_weight": 0.0}, 68.34),
        ({"prompt_sets": "g"}, {"distillation_weight": 0.0}, 64.30),
        ({}, {"shared_prompts": "all"}, 74.97),
        ({}, {"shared_prompts": "all", "distillation_weight": 0.0}, 73.31),
        ({}, {"shared_prompts": "b", "distillation_weight": 0.0}, 70.12),  # printed: 70.18
        ({"prompt_sets": "g"}, {"shared_prompts": "all"}, 74.71),
        ({"prompt_sets": "g"}, {"shared_prompts": "all", "distillation_weight": 0.0}, 60.21),
        ({"prompt_sets": "g"}, {}, None),
        ({}, {"shared_prompts": "b"}, None),
        ({"sample_share": 0.5}, {}, None),
        ({"dataset": "digits"}, {}, None),
    ],
)
def test_settings_of_a_row_of_the_paper_have_its_numbers(
    common: dict[str, Any], own: dict[str, Any], mean: float | None
) -> None:
    found = published("fedevprompt", own, **common)
    if mean is None:
        assert found == {}
        return
    assert set(found) == {*SITES, "all"}
    assert found["all"]["balanced-accuracy"] == pytest.approx(mean / 100, abs=1e-4)


@pytest.mark.parametrize(
    ("method", "accuracy"), [("feddistill", 0.8108), ("fedproto", 0.7188), ("fedprox", 0.8134)]
)
def test_a_method_of_table_1_has_its_numbers_at_the_papers_sites_alone(
    method: str, accuracy: float
) -> None:
    found = published(method, {})
    assert found["bcn"]["balanced-accuracy"] == pytest.approx(accuracy)
    assert published(method, {}, ("s1a", "s2a", "s3a")) == {}
