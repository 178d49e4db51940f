"""Why the model of a finished run answers as it does for one sample, whatever its network is."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fedsilo.client_app.lab import Lab
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.contract.errors import DataError
from fedsilo.models.methods.picsr import PICSRNetwork
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork

if TYPE_CHECKING:
    from fedsilo.client_app.explain.columns import ColumnExplanation
    from fedsilo.client_app.explain.image_explanation import ImageExplanation
    from fedsilo.client_app.explain.routing import PatientExplanation
    from fedsilo.models.networks.prompted_vit import PromptedViT

    Explanation = ImageExplanation | PatientExplanation | ColumnExplanation


def explain_sample(lab: Lab, split: str, row: int) -> Explanation:
    """Say why the model answers as it does for one sample of this silo, as ``explain_case`` does.

    Raises:
        SettingError: the network's last maps are too small to explain an image by.
        DataError: the split has no such row.
    """
    refuse_row(lab.silo, split, row)
    chosen, names = lab.silo.splits()[split], lab.silo.class_names()
    title = f"{lab.site}, {split} row {row}: truth {names[int(chosen.labels[row])]}"
    return explain_case(lab, lab.open(), chosen, row, title)


def explain_case(lab: Lab, network: SiteNetwork, cases: Split, row: int, title: str) -> Explanation:
    """Say why a network answers as it does for one of several cases.

    A router explains itself; a row of a table is explained by its columns' Shapley values, an image
    by where a prompted ViT looked, by a convolutional network's Grad-CAM, or else by occlusion.

    Args:
        lab: the method's, at the site.
        network: the one that answers.
        cases: as the silo holds its samples; their labels are not read.
        row: the case.
        title: names it.
    """
    names, features = lab.silo.class_names(), list(lab.silo.features)
    if isinstance(network, PICSRNetwork):
        from fedsilo.client_app.explain.routing import explain_routing

        title = f"{title}; probabilities are of '{names[-1]}'"
        return explain_routing(network, float_inputs(cases.inputs[row]), title, features)
    if features:
        from fedsilo.client_app.explain.columns import explain_columns

        return explain_columns(network, cases.inputs[row], features, names, title)
    if lab.common.network != "vit":
        from fedsilo.client_app.explain.gradcam import explain_by_grad_cam, has_maps

        if has_maps(network):
            return explain_by_grad_cam(network, cases, lab.compute, row, title, names)
        from fedsilo.client_app.explain.occlusion import explain_by_occlusion

        return explain_by_occlusion(network, cases, row, title, names, lab.compute)
    from fedsilo.client_app.explain.attention import explain_by_attention

    return explain_by_attention(cast("PromptedViT", network), cases, lab.compute, row, title, names)


def refuse_row(silo: Silo, split: str, row: int) -> None:
    """Refuse a row that ``split`` does not have.

    Raises:
        DataError: says how many it has.
    """
    count = len(silo.splits()[split])
    if not 0 <= row < count:
        raise DataError(
            f"site {silo.name} has {count} {split} rows, counted from 0: there is no row {row}"
        )
