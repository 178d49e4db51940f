"""Explain the prediction of a finished run's model for one sample, for any network."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fedsilo.client_app.lab import Lab
from fedsilo.core.errors import DataError
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.methods.picsr import PICSRNetwork
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork

if TYPE_CHECKING:
    from fedsilo.explanations.columns import ColumnExplanation
    from fedsilo.explanations.image_explanation import ImageExplanation
    from fedsilo.explanations.routing import PatientExplanation
    from fedsilo.models.networks.prompted_vit import PromptedViT

    Explanation = ImageExplanation | PatientExplanation | ColumnExplanation


def explain_sample(lab: Lab, split: str, row: int) -> Explanation:
    """Explain the model's prediction for one sample of a site.

    ``explain_case`` chooses the kind of explanation, such as Grad-CAM for a convolutional network.
    The title of the explanation names the site, the split, the row and the true class.

    Args:
        lab: the site's data and its model after the run.
        split: 'train', 'val' or 'test'.
        row: the number of the sample in the split, counted from 0.

    Raises:
        SettingError: Grad-CAM does not work, because the network's last feature maps have one cell.
        DataError: the row is not in the split.
    """
    refuse_row(lab.silo, split, row)
    chosen, names = lab.silo.splits()[split], lab.silo.class_names()
    title = f"{lab.site}, {split} row {row}: truth {names[int(chosen.labels[row])]}"
    return explain_case(lab, lab.open(), chosen, row, title)


def explain_case(lab: Lab, network: SiteNetwork, cases: Split, row: int, title: str) -> Explanation:
    """Explain a network's prediction for one case, in the way that fits the network and the data.

    The first line that applies decides the kind of explanation:

    1. PICSR, a mixture of the sites' networks: the weights of these networks.
    2. Data in a table: Shapley values of the columns.
    3. A ViT: a map of its attention.
    4. A single convolutional network of fedsilo: a Grad-CAM map.
    5. Any other network: a map that shows how much each part of the image matters.

    Args:
        lab: the site, which gives the names of classes and columns, and the device.
        network: the network that predicts.
        cases: the samples, in the form in which a site stores them; their labels are not read.
        row: the number of the case in ``cases``, counted from 0.
        title: a name for the case.

    Raises:
        SettingError: Grad-CAM does not work, because the network's last feature maps have one cell.
    """
    names, features = lab.silo.class_names(), list(lab.silo.features)
    # Imported when needed, because captum takes seconds to import
    if isinstance(network, PICSRNetwork):
        from fedsilo.explanations.routing import explain_routing

        sample = float_inputs(cases.inputs[row])
        return explain_routing(network, sample, title, features, f"'{names[-1]}'")
    if features:
        from fedsilo.explanations.columns import explain_columns

        return explain_columns(network, cases.inputs[row], features, names, title)
    if lab.common.network != "vit":
        from fedsilo.explanations.saliency_maps import explain_by_grad_cam, has_maps

        if has_maps(network):
            return explain_by_grad_cam(network, cases, lab.compute, row, title, names)
        from fedsilo.explanations.saliency_maps import explain_by_occlusion

        return explain_by_occlusion(network, cases, row, title, names, lab.compute)
    from fedsilo.explanations.attention import explain_by_attention

    return explain_by_attention(cast("PromptedViT", network), cases, lab.compute, row, title, names)


def refuse_row(silo: Silo, split: str, row: int) -> None:
    """Check that a site has a row in a split.

    Args:
        silo: the site's local data.
        split: 'train', 'val' or 'test'.
        row: the number of the row, counted from 0.

    Raises:
        DataError: the split does not have the row. The message says how many rows it has.
    """
    count = len(silo.splits()[split])
    if not 0 <= row < count:
        raise DataError(
            f"site {silo.name} has {count} {split} rows, counted from 0, but no row {row}"
        )
