"""``fedsilo attention``: draws a ViT's attention on its most certain images of each site.

It runs on the machine that has the images, as ``fedsilo explain`` does; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fedsilo.core.drawing.palette import BLACK, WRONG
from fedsilo.core.errors import SettingError
from fedsilo.explanations.attention import most_certain_explanations
from fedsilo.explanations.image_explanation import ImageExplanation, draw_image, draw_map
from fedsilo.pictures.learning_curves import write_picture
from fedsilo.pictures.panel_grids import new_figure
from fedsilo.runs.finished_run import FinishedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedsilo.models.networks.prompted_vit import PromptedViT


def attention(
    run_dir: Path,
    sites: Sequence[str] = (),
    split: str = "test",
    images: int = 5,
    data_dir: Path | None = None,
    state_dir: Path | None = None,
    out: Path | None = None,
) -> Iterator[Path | str]:
    """Draw for each site the model's attention on its most certain images of each class.

    All sites are drawn if ``sites`` is empty, with at most ``images`` images per class.

    Yields:
        The path of each sheet, or a line about a site that has no images in the split.

    Raises:
        FedsiloError: the run has not ended, or its network is no ViT.
    """
    run = FinishedRun.open(run_dir)
    for name in sites or run.silos:
        lab = run.lab(name, data_dir, state_dir, split=split)
        if lab.common.network != "vit":
            raise SettingError(
                f"{run_dir} has network '{lab.common.network}', but only a ViT has attention to "
                "draw: name a run of network 'vit'"
            )
        network = cast("PromptedViT", lab.open())
        held, classes = lab.silo.splits()[split], lab.silo.class_names()
        if not len(held):
            yield f"site {name} has no {split} images"
            continue
        sheet = most_certain_explanations(network, held, lab.compute, classes, images)
        title = f"{name}: most certain {split} images of each class, with the model's attention"
        path = (out or run_dir) / f"attention-{name}.png"
        write_picture(path, draw_sheet(sheet, classes, title, images))
        yield path


def draw_sheet(
    sheet: Sequence[Sequence[ImageExplanation]], classes: Sequence[str], title: str, columns: int
) -> Figure:
    """Draw two rows per class: the images, and below them the images with their maps.

    ``sheet`` has for each class the explanations of up to ``columns`` images. A wrong prediction
    has another colour.
    """
    width = max(0.8 + 1.7 * columns, 0.085 * len(title))
    figure = new_figure(width, 0.9 + 3.5 * len(classes))
    panels = figure.subplots(2 * len(classes), columns, squeeze=False)
    for axes in panels.flatten():
        axes.set_axis_off()
    for label, (name, explanations) in enumerate(zip(classes, sheet, strict=True)):
        upper, lower = panels[2 * label], panels[2 * label + 1]
        if not explanations:
            upper[0].set_title(f"{name}: no image", fontsize="small", loc="left")
        for above, below, explanation in zip(upper, lower, explanations, strict=False):
            draw_image(above, explanation.image)
            draw_map(below, explanation.image, explanation.saliency)
            answer = explanation.answer()
            measure, value = explanation.uncertainty()
            caption = f"{name}: predicted {classes[answer]}\n{measure} {value:.2f}"
            colour = BLACK if answer == label else WRONG
            above.set_title(caption, fontsize="x-small", color=colour)
    figure.suptitle(title, fontsize="medium")
    return figure
