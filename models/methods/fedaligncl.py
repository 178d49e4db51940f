"""Fed-Align-CL (Jimenez-Sanchez et al. 2023): curriculum, alignment and noise as pure functions.

Curriculum: eq. 4 and the permutation drawn by it. Alignment: eq. 2 for the discriminator, and for
the feature extractor eq. 3, with the other sites' discriminators or as it looks from one site
(``alignment_loss``).
The discriminator's layers are table IV's but for the last, which prints two outputs: one, a logit,
is ours. So is the softmax cross-entropy in place of eq. 1's two sigmoids.

Equations (arXiv:2107.02504):
  (1) classification loss -> models.networks.classifier.TokenClassifier.loss
  (2) discriminator's loss -> models.methods.fedaligncl.discriminator_loss
  (3) alignment loss -> models.methods.fedaligncl.paired_alignment_loss
  (4) score of a sample -> models.methods.fedaligncl.curriculum_scores
  (pi) order of the samples -> models.methods.fedaligncl.curriculum_order
  (Z) noise on what leaves -> models.methods.fedaligncl.perturbed
  (tau) rounds of an epoch -> models.maths.pacing.epoch_of
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from fedsilo.models.contract.notes import Notes
from fedsilo.models.contract.settings_schema import setting
from fedsilo.models.privacy.gaussian_noise import normals

EMBEDDINGS = "embeddings"  # of the sender; those of others are ``embeddings/<site>``
DISCRIMINATOR = "discriminator/"  # before an array of the sender's
DISCRIMINATORS = "discriminators/"  # before ``<site>/<array>`` of another's
_HIDDEN = 4  # of the discriminator


@dataclass(frozen=True)
class FedAlignCLSettings:
    """The method's own settings; ``epoch-steps`` (Q) and ``pace`` (tau) are common ones."""

    align: bool = setting(True, "adversarial alignment (Fed-Align)")
    curriculum: bool = setting(True, "forgotten samples come earlier (Fed-CL)")
    pretraining_epochs: int = setting(
        0,
        "epochs that each site trains alone, on its own data, before its first round: the paper's "
        "start 'Local'",
        minimum=0,
        maximum=100_000,
    )
    warmup_epochs: int = setting(5, "epochs before alignment and curriculum begin", minimum=0)
    forgotten_weight: float = setting(
        2.0, "how much likelier a forgotten sample is drawn, eq. 4", minimum=1.0
    )
    curriculum_sampling: str = setting(
        "permutation",
        "each sample once, or drawn with replacement as the authors' code does",
        choices=("permutation", "replacement"),
    )
    count_forgotten: bool = setting(
        False, "count forgotten samples also without curriculum, for comparison"
    )
    alignment_weight: float = setting(1.0, "factor of the alignment loss", above=0.0)
    align_target: str = setting(
        "complement",
        "whose discriminators an embedding is a target of, eq. 3: the other sites', which then "
        "leave them, or the complement of the site's own in their place",
        choices=("complement", "others"),
    )
    discriminator_learning_rate: float = setting(
        0.0, "step size of the discriminator; 0: learning-rate", minimum=0.0
    )
    shared_embeddings: int = setting(
        64, "noisy embeddings of training images that a site sends each round", minimum=2
    )
    embedding_draw: str = setting(
        "run",
        "of which images: the same in the whole run, or others each round, in the end of all",
        choices=("run", "round"),
    )
    noise_variance: float = setting(
        0.001, "variance of the Gaussian noise on what leaves a site", minimum=0.0
    )
    noise_scale: str = setting(
        "absolute",
        "noise as it stands, or times each array's own standard deviation (as a factor of it)",
        choices=("absolute", "relative"),
    )
    weighting: str = setting(
        "equal", "sites weigh the same, or as their samples", choices=("equal", "samples")
    )


@dataclass(frozen=True)
class EmbeddingNotes(Notes):
    """How many noisy embeddings the reply is to hold."""

    embeddings: int = 0


def curriculum_scores(local_right: Tensor, global_right: Tensor, weight: float) -> Tensor:
    """Return rho (n,) float64 of eq. 4: ``weight`` for forgotten samples, 1 for the others.

    Args:
        local_right: (n,) bool, whether the local model was right before the aggregation.
        global_right: (n,) bool, whether the global model is after it.
        weight: 2 in the paper.
    """
    forgotten = local_right & ~global_right
    return torch.where(forgotten, weight, 1.0).double()


def curriculum_order(scores: Tensor, rng: torch.Generator, replacement: bool = False) -> Tensor:
    """Return the samples' order pi (n,), drawn with probability proportional to ``scores`` (n,).

    Without replacement each sample comes once, as if drawn one by one from those left (exponential
    keys, Efraimidis and Spirakis 2006); with it a sample may come often or never.
    """
    if replacement:
        return torch.multinomial(scores, len(scores), replacement=True, generator=rng)
    uniform = torch.rand(len(scores), generator=rng, dtype=torch.float64)
    return torch.argsort(-torch.log1p(-uniform) / scores, stable=True)


class Discriminator(nn.Module):
    """Tells a site's own embeddings from others': c-4-1 with ReLU (the paper's table IV)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(channels, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map embeddings (n, c) to logits (n,) of being the site's own."""
        logits: Tensor = self.layers(embeddings)
        return logits.squeeze(1)


def discriminator_loss(discriminator: nn.Module, own: Tensor, other: Tensor) -> Tensor:
    """Return L_D of eq. 2: -E log D(own) - E log(1 - D(other)).

    Args:
        discriminator: maps embeddings (n, c) to logits (n,).
        own: (n, c); no gradient goes to what made them.
        other: (m, c) noisy embeddings of another site.
    """
    return softplus(-discriminator(own.detach())).mean() + softplus(discriminator(other)).mean()


def alignment_loss(discriminator: nn.Module, own: Tensor) -> Tensor:
    """Return L_F of eq. 3, both terms in which the site's own feature extractor stands.

    In eq. 3 a site's features are the source under its own discriminator, -E log D(own), and the
    target under another site's, -E log D'(own). That one stays at its site; trained to tell the
    same two sites apart the other way round it is 1 - D, which stands in for it. The sum is least
    where D is 1/2: where the site cannot be told from the others.

    Args:
        discriminator: maps embeddings (n, c) to logits (n,); its parameters get no gradient.
        own: (n, c) with gradient.
    """
    with _frozen(discriminator):
        logits = discriminator(own)
    return (softplus(-logits) + softplus(logits)).mean()


def paired_alignment_loss(
    discriminator: nn.Module, others: Sequence[nn.Module], own: Tensor, sent: Tensor
) -> Tensor:
    """Return L_F of eq. 3 with the other sites' own discriminators, a pair of sites on average.

    -E log D(own) - 1/m sum over the m others of E log D'(sent): the site's features are the source
    of its own discriminator, and the target of each other's, to which they come with noise.

    Args:
        discriminator: the site's own; maps embeddings (n, c) to logits (n,).
        others: those of the m other sites, m at least 1; no parameter of any gets a gradient.
        own: (n, c) with gradient.
        sent: (n, c), Z(own), noisy as the other sites see them, with gradient.
    """
    with _frozen(discriminator, *others):
        source = softplus(-discriminator(own)).mean()
        targets = [softplus(-other(sent)).mean() for other in others]
    return source + torch.stack(targets).mean()


@contextmanager
def _frozen(*modules: nn.Module) -> Iterator[None]:
    """Keep gradients from the parameters within, which a backward pass would else fill."""
    trained = [one for module in modules for one in module.parameters() if one.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def perturbed(
    arrays: Mapping[str, Tensor],
    names: Collection[str],
    settings: FedAlignCLSettings,
    rng: torch.Generator | None,
) -> dict[str, Tensor]:
    """Return ``arrays``, those of ``names`` with Gaussian noise: Z of algorithm 1.

    Absolute noise is N(0, noise-variance), relative noise has noise-variance times the array's own
    standard deviation. It is no differential privacy: nothing bounds what it hides. Of ``rng`` see
    ``fedsilo.models.privacy.gaussian_noise``.
    """
    if not settings.noise_variance:
        return dict(arrays)
    noisy = dict(arrays)
    for name in sorted(names):
        array = arrays[name].detach().float().cpu()
        noise = normals(array.shape, rng, torch.float32)
        if settings.noise_scale == "relative":
            spread = settings.noise_variance * float(array.std(correction=0))
        else:
            spread = math.sqrt(settings.noise_variance)
        noisy[name] = array + spread * noise
    return noisy
