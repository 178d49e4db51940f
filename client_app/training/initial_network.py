"""The network that a run starts from, as one site opens it: the same weights everywhere."""

import torch
from torch import Tensor, nn

from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.weights.backbones import load_backbone
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.dirichlet import evidences, skewed_prior
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import TokenClassifier


def initial_classifier(common: CommonSettings, silo: Silo) -> TokenClassifier:
    """Return the network with the seed's initial weights, the backbone's and the site's prior.

    Raises:
        SettingError: the backbone's weights are missing or of another architecture.
    """
    network = build_classifier(common, silo.task)
    if common.backbone_weights or common.network == "vit":
        load_backbone(network, common)
    if network.evidence and not common.is_private():  # a prior is made of all patients' labels
        set_prior(network, silo.train.labels)
    return network


def set_prior(network: nn.Module, labels: Tensor) -> None:
    """Give an evidential network the prior of ``labels`` (n,), what it is trained on."""
    for evidence in evidences(network):
        counts = torch.bincount(labels, minlength=len(evidence.prior))
        evidence.prior.copy_(skewed_prior(counts))
