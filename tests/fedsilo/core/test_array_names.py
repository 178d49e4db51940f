from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.array_names import arrays_below, by_site, with_prefix

NAMES = st.dictionaries(st.text("ab/.", max_size=4), st.integers(), max_size=5)


def test_arrays_below_a_prefix_come_sorted_by_the_rest_of_their_names() -> None:
    arrays = {"router/b": 1, "prototype/router/x": 2, "router/a.w": 3, "router": 4, "router/": 5}
    found = arrays_below("router/", arrays)
    assert list(found.items()) == [("", 5), ("a.w", 3), ("b", 1)]
    assert arrays_below("expert/", arrays) == {}


def test_what_is_compared_is_names_never_arrays() -> None:
    class Array:
        """No two can be ordered, as of tensors none can."""

    first, second = Array(), Array()
    assert arrays_below("a/", {"a/y": first, "a/x": second}) == {"x": second, "y": first}


@given(NAMES)
def test_a_prefix_that_is_put_before_names_is_taken_off_again(arrays: dict[str, int]) -> None:
    named = with_prefix("kind/", arrays)
    assert list(named) == [f"kind/{name}" for name in arrays]
    assert arrays_below("kind/", {**named, "other": 1}) == arrays


def test_the_first_slash_below_a_kind_ends_the_site_and_others_belong_to_the_array() -> None:
    assert by_site({"st.mary/head.1/bias": 1}) == {"st.mary": {"head.1/bias": 1}}
    assert by_site({"st.mary": 1}) == {"st.mary": {"": 1}}


def test_arrays_are_told_apart_by_site_and_sites_come_sorted() -> None:
    found = by_site({"b/w.x": 2, "a/w.x": 1, "a/w/y": 3})
    assert list(found) == ["a", "b"]
    assert found == {"a": {"w.x": 1, "w/y": 3}, "b": {"w.x": 2}}
