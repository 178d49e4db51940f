"""Settings as files have them: in groups, or by their whole names."""

from typing import Any

import pytest

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.written_settings import flat_values, group_settings


def test_groups_become_keys_with_a_dot_and_back() -> None:
    content = {"rounds": 3, "train": {"batch-size": 4, "pace": 2}}
    flat = flat_values(content)
    assert flat == {"rounds": 3, "train.batch-size": 4, "train.pace": 2}
    assert group_settings(flat) == content


@pytest.mark.parametrize(
    "content",
    [
        {"train.batch-size": 3, "train": {"batch-size": 4}},
        {"train": {"batch-size": 4}, "train.batch-size": 4},
    ],
)
def test_a_setting_in_its_group_and_by_its_whole_name_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"f.toml: setting 'train.batch-size' is given twice"):
        flat_values(content, "f.toml")


@pytest.mark.parametrize("value", [[1], {}, {"a": {"b": 1}}, None])
def test_a_value_is_single(value: Any) -> None:
    with pytest.raises(SettingError, match="'train"):
        flat_values({"train": {"batch-size": value}})
