"""FedDistill (Seo et al. 2022, after Jeong et al. 2018): sites share mean logits by class.

A site sends ``logits/<class>``, its mean logits of a class, and receives the other sites' mean
under the same name; the server keeps ``logits/<site>/<class>``.

Equations (arXiv:2011.02367, after arXiv:1811.11479):
  (mean logits) sums behind a class's mean -> models.maths.class_means.class_sums
  (others' mean) what a site learns from -> strategies.methods.class_means.FedDistill.round
  (objective) distance to the others' mean -> models.maths.class_means.matching_loss
"""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.core.tasks import CLASSIFICATION

LOGITS = "logits/"


@dataclass(frozen=True)
class FedDistillSettings(OwnSettings):
    """Settings of FedDistill; lambda 0, which is ``local``, is not allowed."""

    title = "FedDistill"
    tasks = (CLASSIFICATION,)
    why_tasks = "sends the mean logits of each class"
    server = "fedsilo.strategies.methods.class_means:FedDistill"
    site = "fedsilo.client_app.methods.feddistill:FedDistillSite"

    logit_weight: float = setting(
        1.0, "weight lambda of the distance to the others' mean logits", gt=0.0
    )
    class_min_count: int = setting(
        10, "a class mean over fewer training samples does not leave its site", ge=1
    )
