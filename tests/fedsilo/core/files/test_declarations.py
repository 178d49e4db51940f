"""What a model refuses is one line that names the place and no value."""

from typing import Annotated, Any

import pytest
from pydantic import ConfigDict

from fedsilo.core.errors import DataError
from fedsilo.core.files.declarations import (
    FileModel,
    Text,
    check_content,
    number,
    whole,
)


class Ward(FileModel):
    model_config = ConfigDict(title="a ward")

    name: Text
    beds: Annotated[int, whole(1, 99)] = 1


class Hospital(FileModel):
    model_config = ConfigDict(title="the hospital")

    wards: list[Ward]
    by_name: dict[str, list[Ward]] = {}  # noqa: RUF012  # pydantic copies it
    share: Annotated[float, number(0.0, 0.5)] = 0.1


def refusal(content: Any) -> str:
    with pytest.raises(DataError) as caught:
        check_content(Hospital, content, lambda sentence: DataError(f"h.yaml: {sentence}"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "the hospital must be a mapping with the keys wards, by-name, share"),
        ({"ward": []}, "the hospital has the unknown key 'ward'; did you mean 'wards'?"),
        ({"wards": [], "x" * 99: 1}, "the unknown key '" + "x" * 59 + "…'; allowed: wards"),
        ({"wards": [], "a\nb": 1}, "the unknown key 'a b'; allowed"),
        ({}, "the hospital lacks the key 'wards'"),
        ({"wards": {}}, "'wards' must be a list"),
        ({"wards": ["Smith"]}, "a ward must be a mapping with the keys name, beds"),
        ({"wards": [{"beds": 1}]}, "a ward lacks the key 'name'"),
        ({"wards": [{"name": 1, "bed": 1}]}, "a ward has the unknown key 'bed'; did you mean"),
        ({"wards": [{"name": None}]}, "'wards', item 1, 'name' must be a text or a number; YAML"),
        ({"wards": [{"name": "a", "beds": "9"}]}, "item 1, 'beds' must be a whole number from 1"),
        ({"wards": [{"name": "a", "beds": True}]}, "'beds' must be a whole number from 1 to 99"),
        ({"wards": [{"name": "a", "beds": 1.0}]}, "'beds' must be a whole number from 1 to 99"),
        ({"wards": [], "share": float("nan")}, "'share' must be a number from 0.0 to 0.5"),
        ({"wards": [], "share": 10**400}, "'share' must be a number from 0.0 to 0.5"),
        ({"wards": [], "by-name": {"x": [{}]}}, "a ward lacks the key 'name'"),
        ({"wards": [], "by-name": {"x": 1}}, "'by-name', 'x' must be a list"),
        ({"wards": [], "by_name": {}}, "unknown key 'by_name'; did you mean 'by-name'?"),
    ],
)
def test_a_fault_is_one_line_with_place_and_what_must_stand_there(content: Any, told: str) -> None:
    assert told in refusal(content)
    assert refusal(content).startswith("h.yaml: ")
    assert "\n" not in refusal(content)
    assert "Smith" not in refusal(content)


def test_what_the_file_names_is_told_from_defaults() -> None:
    model = check_content(Hospital, {"wards": [], "share": 0}, DataError)
    assert model.stated_fields() == {"wards": [], "share": 0.0}
    assert model.by_name == {}
