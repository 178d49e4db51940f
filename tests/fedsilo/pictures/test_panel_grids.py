"""Pictures of several runs: how many panels a row, which run went wrong, whose state is whose."""

from pathlib import Path

import pytest

from fedsilo.core.errors import DataError, SettingError
from fedsilo.pictures.panel_grids import naming, panel_grid, refuse_shared_state


@pytest.mark.parametrize(
    ("count", "size"), [(1, (3.0, 2.5)), (3, (7.0, 2.5)), (4, (7.0, 4.5)), (6, (7.0, 4.5))]
)
def test_panel_grid_fills_rows_of_three(count: int, size: tuple[float, float]) -> None:
    figure, panels = panel_grid(count, 3, (2.0, 2.0), (1.0, 0.5))
    assert len(panels) == count
    assert tuple(figure.get_size_inches()) == size
    assert sum(axes.axison for axes in figure.axes) == count


def test_what_goes_wrong_with_a_run_names_it_once() -> None:
    run = Path("runs/first")
    with pytest.raises(DataError, match=r"^runs/first: too few$"), naming(run):
        raise DataError("too few")
    with pytest.raises(DataError, match=r"^runs/first has none$"), naming(run):
        raise DataError("runs/first has none")


@pytest.mark.parametrize(("runs", "sites"), [(2, 1), (1, 2)])
def test_one_folder_of_state_is_for_one_site_of_one_run(runs: int, sites: int) -> None:
    folders = [Path(str(number)) for number in range(runs)]
    with pytest.raises(SettingError, match="state has the state of one site in one run"):
        refuse_shared_state(Path("state"), folders, sites)
    refuse_shared_state(Path("state"), folders[:1], 1)
    refuse_shared_state(None, folders, sites)
