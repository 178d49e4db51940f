"""Common parts of the pictures of runs: figures without pyplot, grids of panels, titles, errors."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.core.errors import FedsiloError, SettingError
from fedsilo.core.settings_schema import without_groups
from fedsilo.runs.finished_run import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure with a width and height in inches."""
    from matplotlib.figure import Figure  # not pyplot, which has global state and wants a display

    return Figure(figsize=(width, height), layout="constrained")


def panel_grid(
    count: int,
    columns: int,
    panel: tuple[float, float],
    margin: tuple[float, float] = (0.0, 0.0),
    **shared: Any,
) -> tuple[Figure, list[Axes]]:
    """Create a figure with ``count`` panels, in rows of at most ``columns``.

    If the last row is not full, its empty places stay blank.

    Args:
        count: the number of panels, at least 1.
        columns: the largest number of panels in a row.
        panel: the width and height of a panel in inches.
        margin: the width and height in inches to add to the whole figure.
        shared: matplotlib's ``sharex`` and ``sharey``.

    Returns:
        The figure, and the axes of the ``count`` panels, row by row.
    """
    columns = min(columns, count)
    rows = -(-count // columns)  # ceiling division
    figure = new_figure(margin[0] + panel[0] * columns, margin[1] + panel[1] * rows)
    # squeeze=False returns (rows, columns) for a single panel too
    panels = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def over_rounds(axes: Axes) -> None:
    """Set integer ticks on the x axis, which counts rounds or epochs, and draw a grid."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)


def run_title(run: FinishedRun) -> str:
    """Build the title of a run, for a picture that shows several runs.

    The first line is the name of the run directory. The next lines have the title of the run's
    method, and each setting of the method that differs from its default. This text is wrapped at 40
    characters.
    """
    own = run.settings.own
    # Groups are left out, because the title already names the method
    usual = without_groups(type(own)())
    parts = [run.summary["title"]]
    for key, value in without_groups(own).items():
        if value != usual[key]:
            parts.append(f"{key} {value}")
    lines = textwrap.wrap(", ".join(parts), 40, break_on_hyphens=False)
    return "\n".join([run.path.resolve().name, *lines])


@contextmanager
def naming(run_dir: Path) -> Iterator[None]:
    """Add the run directory to the text of errors that are raised in the ``with`` block.

    A command may read several runs, so an error must tell which run it is about. The path of the
    directory is put before the text of any FedsiloError, unless the text has the path already. The
    type of the error stays the same.
    """
    try:
        yield
    except FedsiloError as error:
        text = str(error)
        if str(run_dir) not in text:
            text = f"{run_dir}: {text}"
        raise type(error)(text) from None


def refuse_shared_state(state_dir: Path | None, runs: Sequence[Path], sites: int) -> None:
    """Check that a folder of private state is given for only one run and one site.

    Private state is the part of a model that a site keeps for itself. Such a folder has the state
    of only one site in one run.

    Args:
        state_dir: the folder; None always passes.
        runs: the run directories.
        sites: the number of sites.

    Raises:
        SettingError: ``state_dir`` is given with several runs or sites.
    """
    if state_dir and (len(runs) > 1 or sites > 1):
        raise SettingError(
            f"--state-dir {state_dir} has the state of one site in one run: name one run and one "
            "site, or remove it if the run directories have the states"
        )
