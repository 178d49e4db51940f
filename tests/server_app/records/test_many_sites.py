"""Of many sites the worst are named and the others counted."""

from fedsilo.server_app.records.many_sites import MANY, join_names, worst

NAMES = [f"s{number:02}" for number in range(30)]


def test_few_names_are_listed_and_of_many_the_first() -> None:
    assert join_names(NAMES[:2]) == "s00, s01"
    assert join_names(NAMES[:MANY]).count(",") == MANY - 1
    assert join_names(NAMES) == "s00, s01, s02, s03, s04 and 25 more"


def test_the_worst_are_the_lowest_or_the_highest() -> None:
    values = {name: float(place) for place, name in enumerate(NAMES)}
    assert worst(values) == NAMES[:5]
    assert worst(values, high_is_worse=True) == NAMES[:-6:-1]
    assert worst({"b": 1.0, "a": 1.0}) == ["a", "b"]
