import dataclasses
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from fedsilo.core.errors import SettingError, unknown_key
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import (
    Value,
    as_mapping,
    build,
    build_from_file,
    defaults,
    rule_of,
    setting,
    values_of,
)


@dataclasses.dataclass(frozen=True)
class Meal:
    guests: int = setting(4, "people at the table", ge=1, le=12)
    spice_level: float = setting(0.5, "how hot", gt=0.0, lt=1.0)
    main_dish: Literal["stew", "pie"] = setting("stew", "what there is")
    vegan: bool = setting(False, "no animal products")


def test_built_settings_take_given_values_and_keep_other_defaults() -> None:
    meal = build(Meal, {"spice-level": 0.25, "main-dish": "pie"})
    assert meal == Meal(guests=4, spice_level=0.25, main_dish="pie", vegan=False)


@pytest.mark.parametrize("key", ["music", "spice_level", "main-dishes", "batch-size"])
def test_an_unknown_key_is_refused_unless_the_caller_selects_those_of_the_class(key: str) -> None:
    values: dict[str, Value] = {"guests": 2, key: 1}
    with pytest.raises(SettingError, match=f"'{key}'"):
        build(Meal, values)
    assert values_of(Meal, values) == {"guests": 2}
    assert build(Meal, values_of(Meal, values)).guests == 2


@dataclasses.dataclass(frozen=True)
class Order:
    code: str = setting("ab", "code of the dish", pattern="ab|cd")
    price: float = setting(1.0, "in euros", gt=0.0)
    tip: float = setting(0.0, "in euros", ge=0.0)

    def __post_init__(self) -> None:
        if self.tip > self.price:
            raise ValueError("the tip is above the price")


@pytest.mark.parametrize("code", ["xcd", "abx", "ab\n", "abcd", ""])
def test_a_pattern_must_match_the_whole_text(code: str) -> None:
    assert build(Order, {"code": "cd"}).code == "cd"
    with pytest.raises(SettingError, match="'code' must"):
        build(Order, {"code": code})


def test_bytes_are_no_text() -> None:
    values: Any = {"code": b"ab"}
    with pytest.raises(SettingError, match="'code' must be a text"):
        build(Order, values)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_the_error_about_an_infinite_number_asks_for_a_finite_one(value: float) -> None:
    with pytest.raises(SettingError, match="'price' must be a finite number, above 0, but is"):
        build(Order, {"price": value})


def test_a_class_may_refuse_values_together() -> None:
    with pytest.raises(SettingError, match="'Order' are refused: the tip is above the price"):
        build(Order, {"tip": 2.0})


def test_settings_survive_the_way_through_a_mapping_in_declaration_order() -> None:
    meal = Meal(guests=2, vegan=True)
    mapping = as_mapping(meal)
    assert list(mapping) == ["guests", "spice-level", "main-dish", "vegan"]
    assert build(Meal, mapping) == meal


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("guests", 0, "at least 1 and at most 12"),
        ("guests", 13, "at least 1 and at most 12"),
        ("guests", True, "a whole number"),
        ("guests", 3.0, "a whole number"),
        ("guests", "3", "a whole number"),
        ("spice-level", 0.0, "above 0 and below 1"),
        ("spice-level", 1, "above 0 and below 1"),
        ("spice-level", True, "a number"),
        ("spice-level", float("nan"), "above 0 and below 1"),
        ("spice-level", float("inf"), "above 0 and below 1"),
        ("main-dish", "soup", "one of stew, pie"),
        ("vegan", 1, "true or false"),
        ("vegan", "false", "true or false"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_name_with_what_is_allowed(
    key: str, value: Value, says: str
) -> None:
    with pytest.raises(SettingError) as caught:
        build(Meal, {key: value})
    assert caught.value.code == "setting"
    assert str(caught.value).startswith(f"'{key}' must be ")
    assert f"but is {value!r}" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_a_text_that_matches_its_pattern_is_taken(device: str) -> None:
    assert build(CommonSettings, {"machine.device": device}).device == device


@pytest.mark.parametrize("device", ["", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:1 ", "autocpu"])
def test_a_text_that_does_not_match_its_pattern_is_refused_in_the_rules_words(device: str) -> None:
    with pytest.raises(SettingError) as caught:
        build(CommonSettings, {"machine.device": device})
    said = f"'machine.device' must be auto, cpu, cuda or cuda:N, but is {device!r}"
    assert said in str(caught.value)


@dataclasses.dataclass(frozen=True)
class Drink:
    size: Literal["small", "large"] = setting("small", "of the glass")


def test_choice_has_its_first_value_as_default_and_takes_no_other() -> None:
    assert Drink().size == "small"
    assert build(Drink, {"size": "large"}).size == "large"
    with pytest.raises(SettingError, match="'size' must be one of small, large, but is"):
        build(Drink, {"size": "huge"})


@dataclasses.dataclass(frozen=True)
class Oven:
    fan: Literal["low", "true", "false"] = setting("low", "whether it turns")


def test_choice_of_the_text_true_takes_what_toml_and_yaml_read_of_it() -> None:
    assert build(Oven, {"fan": True}) == build(Oven, {"fan": "true"}) == Oven("true")
    assert build(Oven, {"fan": False}) == Oven("false")
    with pytest.raises(
        SettingError, match=r"'size' must be a text, one of .*, but is True \(bool\)"
    ):
        build(Drink, {"size": True})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"guest": 3}, "unknown setting 'meal: guest'; did you mean 'meal: guests'"),
        ({7: 3}, "unknown setting 'meal: 7'"),
        ({"guests": [3]}, "setting 'guests' must be a single value, not a list or a mapping"),
        (
            {"guests": None},
            "'guests' must be a whole number, at least 1 and at most 12, but is None",
        ),
        ({"guests": 0}, "'guests' must be at least 1 and at most 12, but is 0"),
    ],
)
def test_a_file_with_another_key_or_value_is_refused(content: dict[Any, Any], says: str) -> None:
    with pytest.raises(SettingError) as caught:
        build_from_file(Meal, content, place="meal: ")
    assert says in str(caught.value)


def test_a_file_may_have_more_keys_if_they_are_named() -> None:
    assert build_from_file(Meal, {"guests": 2, "music": ["folk"]}, more=["music"]).guests == 2


def test_a_key_without_its_group_is_answered_with_the_whole_key() -> None:
    known = ["fedprox.temperature", "moon.temperature", "temper"]
    told = str(unknown_key("temperature", known))
    assert "did you mean 'fedprox.temperature' or 'moon.temperature'?" in told


def test_an_unknown_key_is_answered_with_the_nearest_one() -> None:
    assert "did you mean 'spice-level'?" in str(unknown_key("spice_levle", defaults(Meal)))


def test_a_key_like_no_other_is_answered_with_all_keys_sorted() -> None:
    message = str(unknown_key("zzz", defaults(Meal)))
    assert message.endswith("known keys: guests, main-dish, spice-level, vegan")


_VALUES = st.one_of(
    st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=5)
)


@pytest.mark.parametrize("key", sorted(defaults(CommonSettings)))
@budget(max_examples=15, deadline=None)
@given(value=_VALUES)
def test_a_common_setting_is_taken_with_its_own_type_or_refused(key: str, value: Value) -> None:
    wanted = type(defaults(CommonSettings)[key])
    taken = {wanted, int} if wanted is float else {wanted}
    if isinstance(value, bool) and str(value).lower() in rule_of(CommonSettings, key).choices:
        value = str(build(CommonSettings, {key: value}).deterministic)
    if type(value) not in taken:
        with pytest.raises(SettingError, match=f"'{key}'"):
            build(CommonSettings, {key: value})
        return
    try:
        built = as_mapping(build(CommonSettings, {key: value}))[key]
    except SettingError:
        unwritable = isinstance(value, str) and (not value.isprintable() or value[:1] == "~")
        infinite = value in (float("inf"), float("-inf"))
        assert rule_of(CommonSettings, key).allowed or unwritable or infinite
        return
    assert type(built) is wanted
    assert built == value
