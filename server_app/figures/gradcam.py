"""``fedsilo gradcam``: where runs' convolutional networks find a class in a site's images.

It runs where the images lie, as ``fedsilo explain`` does; nothing is sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from client_app.explain.gradcam import CamLook, draw_cam, draw_image, look_at_maps
from client_app.methods.base import SiteMethod, refuse_row
from datasets.silo.silos import Silo
from models.contract.errors import SettingError
from models.networks.site_network import SiteNetwork
from server_app.figures.explain import finished_settings
from server_app.figures.learning_curves import write_picture
from server_app.figures.style import naming, opened, refuse_shared_state, run_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Column:
    """What one run made of the images: its title and a look at each row."""

    title: str
    looks: list[CamLook]


def gradcam(options: argparse.Namespace) -> None:
    """Draw a sheet: a row per image, a column with the image itself and one per run.

    Raises:
        FedsiloError: a run has not ended, has no convolutional network or other images, or there is
            no such row or class.
    """
    rows = parse_rows(options.rows)
    refuse_shared_state(options.state_dir, options.run_dirs, 1)
    # Before anything is computed: have all the runs ended?
    titles = [run_title(run, finished_settings(run, options.data_dir)) for run in options.run_dirs]
    columns: list[Column] = []
    first: Silo | None = None
    for run_dir, title in zip(options.run_dirs, titles, strict=True):
        with naming(run_dir):
            method, network = opened(run_dir, options.site, options.data_dir, options.state_dir)
            first = first or method.silo
            _refuse_other_images(first, method.silo, options.split)
            looks = _looks(method, network, options.split, rows, options.label)
        columns.append(Column(title, looks))
    labels = method.silo.splits()[options.split].labels
    truths = [int(labels[row]) for row in rows]
    figure = draw_sheet(columns, truths, f"{options.site}: {_subject(options.label)}")
    path: Path = options.picture or options.run_dirs[0] / f"gradcam-{options.site}.png"
    write_picture(path, figure)
    print(path)


def _looks(
    method: SiteMethod, network: SiteNetwork, split: str, rows: Sequence[int], wanted: str | None
) -> list[CamLook]:
    names = list(method.silo.class_names())
    if wanted is not None and wanted not in names:
        raise SettingError(f"--class is '{wanted}'; the classes are {', '.join(names)}")
    label = None if wanted is None else names.index(wanted)
    held, looks = method.silo.splits()[split], []
    for row in rows:
        refuse_row(method.silo, split, row)
        title = f"{split} row {row}\ntruth {names[int(held.labels[row])]}"
        looks.append(look_at_maps(network, held, method.compute, row, title, names, label))
    return looks


def parse_rows(told: str) -> list[int]:
    """Return the rows of ``--rows``, as '0,3,7'.

    Raises:
        SettingError: it is something else.
    """
    parts = [part.strip() for part in told.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SettingError(f"--rows is '{told}'; it must be rows counted from 0, such as 0,3,7")
    return [int(part) for part in parts]


def draw_sheet(columns: Sequence[Column], truths: Sequence[int], title: str) -> Figure:
    """Return the sheet of what runs made of the same images, each map in its own colours.

    An answer that is not the image's class in ``truths`` stands in red.
    """
    from matplotlib.figure import Figure

    rows, head = len(columns[0].looks), max(column.title.count("\n") for column in columns)
    size = (2.6 * (1 + len(columns)), 0.7 + 0.2 * head + 2.85 * rows)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, 1 + len(columns), squeeze=False)
    for index, (first, *others) in enumerate(panels):
        look = columns[0].looks[index]
        draw_image(first, look.image)
        _caption(first, look.title)
        for axes, column in zip(others, columns, strict=True):
            look = column.looks[index]
            draw_cam(axes, look.image, look.cam)
            right = look.said() == truths[index]
            _caption(axes, _answer(look), "black" if right else "tab:red")
            if index == 0:
                axes.set_title(column.title, fontsize="small")
    panels[0, 0].set_title("image", fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _answer(look: CamLook) -> str:
    """Return what a network said, and where that differs the class that is drawn."""
    said, shares = look.said(), look.probabilities
    told = f"says {look.classes[said]}: {shares[said]:.2f}"
    if look.label != said:
        told += f"\nmap of {look.classes[look.label]}: {shares[look.label]:.2f}"
    return told if look.cam.any() else f"{told}\n(nothing speaks for it)"


def _caption(axes: Axes, text: str, colour: str = "black") -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)
    axes.set_xlabel(text, fontsize="small", color=colour)


def _subject(label: str | None) -> str:
    return f"Grad-CAM of class {label}" if label else "Grad-CAM of what each network says"


def _refuse_other_images(first: Silo, own: Silo, split: str) -> None:
    same = first.fingerprints[split] == own.fingerprints[split]
    if not same or first.class_names() != own.class_names():
        raise SettingError(
            f"its {split} images or classes of site {own.name} are not those of the first run: "
            "name runs with the same data settings"
        )
