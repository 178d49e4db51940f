"""Why the model of a finished run answers as it does for one sample, whatever its network is."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fedsilo.client_app.lab import Lab
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.contract.errors import DataError, SettingError
from fedsilo.models.methods.picsr import PICSRNetwork
from fedsilo.models.networks.encoders import float_inputs

if TYPE_CHECKING:
    from fedsilo.client_app.explain.image_explanation import ImageExplanation
    from fedsilo.client_app.explain.routing import PatientExplanation
    from fedsilo.models.networks.prompted_vit import PromptedViT

    Explanation = ImageExplanation | PatientExplanation


def explain_sample(lab: Lab, split: str, row: int) -> Explanation:
    """Say why the model answers as it does for one sample of this silo.

    A router explains itself; an image is explained by where a prompted ViT looked, or by a
    convolutional network's Grad-CAM.

    Raises:
        SettingError: the method explains nothing.
        DataError: the split has no such row.
    """
    network, names = lab.open(), lab.silo.class_names()
    routed = isinstance(network, PICSRNetwork)
    if lab.silo.features and not routed:
        raise SettingError(f"method '{lab.common.method}' does not explain its answers")
    refuse_row(lab.silo, split, row)
    chosen = lab.silo.splits()[split]
    title = f"{lab.site}, {split} row {row}: truth {names[int(chosen.labels[row])]}"
    if routed:
        from fedsilo.client_app.explain.routing import explain_routing

        title = f"{title}; probabilities are of '{names[-1]}'"
        sample = float_inputs(chosen.inputs[row])
        return explain_routing(cast(PICSRNetwork, network), sample, title, list(lab.silo.features))
    if lab.common.network != "vit":
        from fedsilo.client_app.explain.gradcam import explain_by_grad_cam

        return explain_by_grad_cam(network, chosen, lab.compute, row, title, names)
    from fedsilo.client_app.explain.attention import explain_by_attention

    return explain_by_attention(
        cast("PromptedViT", network), chosen, lab.compute, row, title, names
    )


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
