"""Which names sites may have, and that no two of them share a folder."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import DataError
from fedsilo.core.files.site_names import (
    find_by_site,
    folder_name,
    is_site_name,
    site_name_fault,
    site_of_folder,
)
from fedsilo.core.metric_names import read_metric

NAMES = ["Süd", "St. Mary's", "東京", "מרכז", "Hôpital n° 3, Paris", "A+3+", "क्षेत्र", "𠮷野"]
PLAIN = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", fullmatch=True)
ANY = st.text(min_size=1, max_size=64).map(lambda text: unicodedata.normalize("NFC", text))
RESERVED = ("all", "\uff41\uff4c\uff4c")  # the second is 'all' in full-width letters
# What somebody could send to leave a folder, to hide a name, or to be taken for another site
ATTACKS = [
    *(
        "",
        " ",
        "..",
        "../north",
        "a/b",
        "a\\b",
        ".hidden",
        "-rf",
        "all",
        "\uff41\uff4c\uff4c",
        "x" * 65,
    ),
    *("north\u202e", "\u2066north", "no\u200brth", "north\ufeff", "nor\u00adth", "nor\ufe0fth"),
    *("\u3164", "\u2800", "\u034f", "north ", " north", "no  rth", "no\u00a0rth", "no\u3000rth"),
    *("a\nb", "a\x00b", "=1+1", "+1", "@sum", "\ud800", "u\u0308", "\u0301a", "a\u2028b"),
    *("<script>", 'a"b', "a`b`", "a=b", "a|b", "$x$", "*", "東" * 40),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_any_script_has_a_folder_of_its_own_and_metrics(name: str) -> None:
    assert site_name_fault(name) is None
    assert folder_name(name).isascii()
    assert site_of_folder(folder_name(name)) == name
    for metric in (f"accuracy-from-{name}", f"routing.{name}.mean"):
        read = read_metric(metric)
        assert read
        assert read.site == name


@pytest.mark.parametrize("name", ATTACKS)
def test_a_name_that_could_mislead_is_refused(name: str) -> None:
    assert site_name_fault(name)
    assert read_metric(f"accuracy-from-{name}") is None or name in RESERVED


def test_the_folders_of_three_names_are_readable() -> None:
    assert [folder_name(name) for name in NAMES[:3]] == [
        "S+fc+d",
        "St.+20+Mary+27+s",
        "+6771.4eac+",
    ]


@given(PLAIN)
def test_a_plain_name_is_its_own_folder(name: str) -> None:
    assert is_site_name(name)
    assert folder_name(name) == name
    assert site_of_folder(name) == name


@given(ANY, ANY)
def test_no_two_names_share_a_folder_and_none_leaves_its_own(first: str, second: str) -> None:
    for name in (first, second):
        if not is_site_name(name):
            return
        folder = folder_name(name)
        assert Path("/runs", folder).parent == Path("/runs")
        assert site_of_folder(folder) == name
        assert len(folder) <= 160
    assert (folder_name(first) == folder_name(second)) == (first == second)


def test_folders_may_have_the_name_itself_but_a_site_has_one_folder(tmp_path: Path) -> None:
    own, encoded = tmp_path / unicodedata.normalize("NFD", "Süd"), tmp_path / "S+fc+d"
    assert find_by_site({own.name: own}) == {"Süd": own}
    assert find_by_site({encoded.name: encoded}) == {"Süd": encoded}
    with pytest.raises(DataError, match="Süd"):
        find_by_site({own.name: own, encoded.name: encoded})
    with pytest.raises(DataError):
        find_by_site({"+2e.2e+": tmp_path / "+2e.2e+"})  # the encoded name ".."
