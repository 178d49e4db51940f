import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as budget
from hypothesis import strategies as st

from fedsilo.core.errors import DataError
from fedsilo.datasets.partition.silo_sets import Link, SiloSet, great_circle_km, open_silo_set


def read(folder: Path, text: str) -> SiloSet:
    path = folder / "edges.csv"
    path.write_text(text)
    return open_silo_set(str(path))


def test_gaia_links_each_pair_of_its_eleven_regions_once() -> None:
    gaia = open_silo_set("gaia")
    assert len(gaia.names) == 11
    assert gaia.names[:3] == ("virginia", "california", "oregon")
    assert list(gaia.links) == list(itertools.combinations(gaia.names, 2))
    assert {link.gbps for link in gaia.links.values()} == {1.0}


@pytest.mark.parametrize(
    ("one", "other", "km"),  # of the authors' gaia.gml
    [
        ("virginia", "california", 3560.86),
        ("california", "oregon", 825.41),
        ("ireland", "frankfurt", 1091.0),
        ("tokyo", "seoul", 1161.23),
        ("tokyo", "sao-paulo", 18528.66),
        ("sydney", "mumbai", 10144.78),
    ],
)
def test_gaias_latencies_are_those_of_the_published_distances(
    one: str, other: str, km: float
) -> None:
    link = open_silo_set("gaia").link(other, one)
    assert link is not None
    assert link.latency_ms == pytest.approx(4 + 0.0085 * km, rel=0.01)


def test_great_circles_are_as_long_as_they_are_on_a_globe() -> None:
    quarter = 6371 * 3.14159265 / 2
    assert great_circle_km((0, 0), (90, 0)) == pytest.approx(quarter)
    assert great_circle_km((0, -45), (0, 45)) == pytest.approx(quarter)
    assert great_circle_km((0, 179), (0, -179)) == pytest.approx(quarter / 45)
    assert great_circle_km((12, 34), (12, 34)) == 0


def test_a_file_names_silos_in_order_of_appearance_and_may_leave_values_to_the_run(
    tmp_path: Path,
) -> None:
    text = "site,neighbour,latency-ms,gbps\nb,a,5,0.1\nc,b,,10\nc,d,0,\n"
    found = read(tmp_path, text)
    assert found.names == ("b", "a", "c", "d")
    assert found.links == {
        ("b", "a"): Link(5.0, 0.1),
        ("b", "c"): Link(None, 10.0),
        ("c", "d"): Link(0.0, None),
    }


def test_a_file_of_edges_only_is_enough_and_a_link_is_found_from_both_ends(tmp_path: Path) -> None:
    (tmp_path / "ring.csv").write_text("neighbour,site\nb,a\nc,b\n")
    found = open_silo_set(str(tmp_path / "ring.csv"))
    assert found.link("a", "b") == found.link("b", "a") == Link()
    assert found.link("a", "c") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("site,other\na,b\n", r"line 1: the columns must be site, neighbour, latency-ms \(opt"),
        ("site,neighbour,speed\na,b,1\n", "1 unknown"),
        ("site,neighbour\na,b,c\n", "line 2: 3 values, but line 1 names 2 columns"),
        ("site,neighbour\na,b\nc,c\n", "line 3: an edge joins a silo with itself: remove the line"),
        (
            "site,neighbour\na,b\nb,c\nb,a\n",
            "line 4: the edge between these two silos is in line 2",
        ),
        ("site,neighbour\n", "has no edge, but a silo set needs at least 2 silos"),
        ("", "line 1: the columns must be"),
        ("site,neighbour\na,all\n", "line 2: a silo's name must begin with"),
        ("site,neighbour\na,../b\n", r"line 2: a silo's name must begin with"),
        ("site,neighbour\n,b\n", "line 2: a silo's name must begin with"),
        *(
            (f"site,neighbour,gbps\na,b,1\nb,c,{bad}\n", "line 3, column 'gbps': the value must be")
            for bad in ("fast", "nan", "inf", "0", "-1")
        ),
        (
            "site,neighbour,latency-ms\na,b,-0.5\n",
            "column 'latency-ms': the value must be a number",
        ),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["Gaia", "gaya", "/nowhere/edges.csv"])
def test_what_is_neither_a_known_set_nor_a_file_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=f"silo set '{text}' is neither 'gaia' nor a file"):
        open_silo_set(text)


def test_a_folder_is_no_silo_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nor a file"):
        open_silo_set(str(tmp_path))


@budget(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 7), cell=st.sampled_from(["..", "all", "-7.5", "", "Anna/Meier"]))
def test_no_error_quotes_a_cell(tmp_path: Path, place: int, cell: str) -> None:
    cells = ["Meier", "Schmidt", "63", "1", "Meier", "Huber", "71", "2"]
    cells[place] = cell
    file = tmp_path / "patients.csv"
    rows = (",".join(cells[:4]), ",".join(cells[4:]), *["Weber,Lang,1,1"] * 2)  # stands twice
    file.write_text("\n".join(["site,neighbour,latency-ms,gbps", *rows]))
    with pytest.raises(DataError) as caught:
        open_silo_set(str(file))
    said = str(caught.value).replace(str(tmp_path), "").replace("must not be 'all'", "")
    assert not any(cell in said for cell in cells if len(cell) > 2), said
