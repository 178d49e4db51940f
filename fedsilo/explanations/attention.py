"""``fedsilo attention``, and explanations of a prompted ViT's predictions by attention rollout.

Everything here runs at the hospital that has the images; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.core.drawing.palette import BLACK, WRONG
from fedsilo.core.errors import SettingError
from fedsilo.datasets.silo.silos import Split
from fedsilo.explanations.image_explanation import (
    ImageExplanation,
    SaliencyMap,
    draw_image,
    draw_map,
    explain_logits,
)
from fedsilo.models.maths.dirichlet import vacuity
from fedsilo.models.methods.fedevprompt import most_certain
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.pictures.panel_grids import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_sheet(lab: Lab, split: str, images: int) -> Figure | None:
    """Draw a ViT's most certain predictions at a site, with maps of where the ViT looked.

    Each true class has a group of images, the most certain first. An evidential network is most
    certain where its vacuity (lack of evidence) is lowest. Any other network is most certain where
    its largest probability is highest. A certain prediction may be wrong.

    Args:
        lab: the site's data and its model after the run.
        split: 'train', 'val' or 'test'.
        images: the largest number of images for each class.

    Returns:
        The picture; None if the site has no images in the split.

    Raises:
        SettingError: the run's network is not a ViT.
    """
    if lab.common.network != "vit":
        raise SettingError(
            f"the run has network '{lab.common.network}', but only a ViT has attention to draw: "
            "name a run of network 'vit'"
        )
    network = cast(PromptedViT, lab.open())  # the only network named 'vit'
    held, classes = lab.silo.splits()[split], lab.silo.class_names()
    if not len(held):
        return None
    sheet = most_certain_explanations(network, held, lab.compute, classes, images)
    title = f"{lab.silo.name}: most certain {split} images of each class, with the model's "
    return draw_sheet(sheet, classes, f"{title}attention", images)


def draw_sheet(
    sheet: Sequence[Sequence[ImageExplanation]], classes: Sequence[str], title: str, columns: int
) -> Figure:
    """Draw the images of each class in one row, and the same images under their maps below.

    A map shows how important each place of an image is for the prediction. The caption above an
    image gives the true class, the predicted class and the prediction's uncertainty. A wrong
    prediction has a red caption. A class without images is captioned 'no image'.

    Args:
        sheet: the explanations of each class's images, in the order of ``classes``. Only the first
            ``columns`` of each class are drawn.
        classes: the names of the classes.
        title: the title of the picture.
        columns: the number of columns. Panels without an image stay empty.
    """
    width = max(0.8 + 1.7 * columns, 0.085 * len(title))  # wide enough for the title
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


def rollout_map(rollout: Tensor) -> SaliencyMap:
    """Build a saliency map that shows which patches of an image a ViT attended to.

    The map explains no particular class. Its ``place`` is a text with the row and the column,
    counted from 1, of the patch with the highest value. Patches with the smallest value are not
    coloured, because that value is the map's ``floor``.

    Args:
        rollout: the attention rollout, which is the attention over all layers. It has a value for
            each patch, (rows, columns), and sums to 1.
    """
    rows, columns = rollout.shape
    # argmax counts patches row by row
    row, column = divmod(int(rollout.argmax()), columns)
    return SaliencyMap(
        name="rollout",
        values=rollout,
        heading="attention rollout",
        place=f"looked most at row {row + 1}, column {column + 1} of {rows} x {columns} patches",
        # Softmax gives every patch some attention, so only the excess over the minimum counts
        floor=float(rollout.min()),
    )


def explain_by_attention(
    network: PromptedViT,
    split: Split,
    compute: Compute,
    row: int,
    title: str,
    classes: Sequence[str],
) -> ImageExplanation:
    """Explain a ViT's prediction for one image by the patches that it attended to.

    The explanation holds the image, a map of the attention over all layers (rollout), and the
    probabilities.

    Args:
        network: the ViT, on the compute device.
        split: the samples; their labels are not read.
        compute: the device and the precision.
        row: the number of the image in ``split``, counted from 0.
        title: the title of the explanation, such as the name of the image.
        classes: the names of the classes.
    """
    logits = over_batches(network, split.inputs[row : row + 1], compute, network)
    return _explain_rows(network, split, compute, [row], title, classes, logits)[0]


def most_certain_explanations(
    network: PromptedViT, split: Split, compute: Compute, classes: Sequence[str], count: int
) -> list[list[ImageExplanation]]:
    """Explain the most certain predictions of a ViT for each true class.

    An evidential network is most certain where its vacuity (lack of evidence) is lowest. Any other
    network is most certain where its largest probability is highest. A certain prediction may be
    wrong. Each explanation has a map of the ViT's attention, and the true class as its title.

    Returns:
        One list for each class, in the order of ``classes``. It holds up to ``count`` explanations,
        the most certain first. A class with fewer images has a shorter list.
    """
    # All images are predicted, but only the chosen ones need the slower rollout
    logits = over_batches(network, split.inputs, compute, network)
    confidence = logits.softmax(dim=1).max(dim=1).values
    uncertain = 1 - confidence
    if network.evidence:
        uncertain = vacuity(logits.exp())
    by_class = []
    for label, name in enumerate(classes):
        rows = most_certain(uncertain, split.labels, label, count).tolist()
        found = _explain_rows(network, split, compute, rows, name, classes, logits[rows])
        by_class.append(found)
    return by_class


def _explain_rows(
    network: PromptedViT,
    split: Split,
    compute: Compute,
    rows: Sequence[int],
    title: str,
    classes: Sequence[str],
    logits: Tensor,
) -> list[ImageExplanation]:
    """Explain a ViT's predictions for some images by attention rollout.

    Attention rollout combines the attention of all layers into one map, which shows the patches
    that the ViT attended to. The predictions are not computed again. Their probabilities are the
    softmax of ``logits``.

    Args:
        network: the ViT, on the compute device.
        split: the samples.
        compute: the device and the precision.
        rows: the numbers of the images in ``split``, counted from 0. Without any, the result is
            empty.
        title: the title that all explanations get.
        classes: the names of the classes.
        logits: the network's outputs for these images, (len(rows), classes) on the CPU.

    Returns:
        The explanations, in the order of ``rows``.
    """
    if not rows:
        return []
    images = split.inputs[list(rows)]
    prior = network.evidence.prior if network.evidence else None
    maps = over_batches(network, images, compute, lambda x: network.encode_with_rollout(x)[1])
    explanations = []
    for image, rollout, answer in zip(images, maps, logits, strict=True):
        saliency = rollout_map(rollout.reshape(network.grid_size()))
        explained = explain_logits(title, image, saliency, classes, answer[None], prior)
        explanations.append(explained)
    return explanations
