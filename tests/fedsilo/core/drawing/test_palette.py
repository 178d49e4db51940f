"""The palette: told apart in colour, by colour-blind people, and in grey with marker and dash."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from fedsilo.core.drawing.palette import CATEGORIES, colours, line_styles, shades

# What a deuteranope and a protanope see of linear red, green and blue (Machado et al. 2009)
DEUTERANOPIA = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
PROTANOPIA = [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]


def linear(colour: str) -> np.ndarray:
    values = np.array(to_rgb(colour))
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lightness(colour: str) -> float:
    """Return CIE L*, 0 to 100."""
    luminance = float(linear(colour) @ (0.2126, 0.7152, 0.0722))
    return float(116 * np.cbrt(luminance) - 16) if luminance > 0.008856 else 903.3 * luminance


def lab(rgb: np.ndarray) -> np.ndarray:
    """Return CIE L*a*b* of linear red, green and blue."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ rgb.clip(0, 1) / (0.9505, 1.0, 1.089)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", [np.eye(3), DEUTERANOPIA, PROTANOPIA])
def test_any_two_colours_differ_to_colour_blind_people_too(seen: list[list[float]]) -> None:
    several = colours([str(place) for place in range(11)]).values()
    assert list(several)[:7] == list(CATEGORIES)
    shown = [lab(np.array(seen) @ linear(colour)) for colour in several]
    apart = [float(np.linalg.norm(a - b)) for a, b in itertools.combinations(shown, 2)]
    assert min(apart) > 10, "2.3 is just noticeable"


def test_every_colour_can_be_seen_on_white_and_neighbours_differ_in_grey() -> None:
    grey = [lightness(colour) for colour in CATEGORIES]
    assert max(grey) < 75
    assert all(abs(a - b) > 5 for a, b in itertools.pairwise(grey))


@pytest.mark.parametrize("count", [1, 7, 11, 12, 20, 40])
def test_each_name_has_a_colour_of_its_own(count: int) -> None:
    names = [f"site-{place}" for place in range(count)]
    shades = colours(names)
    assert list(shades) == names
    assert len(set(shades.values())) == count


@pytest.mark.parametrize("count", [1, 2, 12])
def test_shades_run_from_dark_to_light_and_stop_before_white(count: int) -> None:
    names = [str(place) for place in range(count)]
    grey = [lightness(colour) for colour in shades(names).values()]
    assert len(grey) == count
    assert grey == sorted(grey)
    assert grey[-1] < 91


def test_more_names_than_colours_have_shades() -> None:
    names = [str(place) for place in range(12)]
    assert colours(names) == shades(names)


def test_of_many_lines_no_two_look_alike() -> None:
    styles = line_styles([str(place) for place in range(56)])
    assert len({tuple(style.options().items()) for style in styles.values()}) == 56
    few = line_styles(list("abcdefg"))
    assert [style.color for style in few.values()] == list(CATEGORIES)
    assert len({style.marker for style in few.values()}) == 7, "told apart in grey"


def test_no_names_have_no_colours() -> None:
    assert colours([]) == {}
    assert line_styles([]) == {}
    assert shades([]) == {}
