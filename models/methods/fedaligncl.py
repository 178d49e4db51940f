"""Fed-Align-CL (Jimenez-Sanchez et al. 2023): a curriculum, and features aligned between sites.

Two points differ from the paper: the discriminator has one output, a logit, where table IV prints
two, and the classification loss is softmax cross-entropy in place of eq. 1's two sigmoids.

Equations (arXiv:2107.02504):
  (1) classification loss -> models.networks.site_network.TokenClassifier.loss
  (2) discriminator's loss -> models.methods.fedaligncl.discriminator_loss
  (3) alignment loss -> models.methods.fedaligncl.paired_alignment_loss
  (3, complement) as one site computes it -> models.methods.fedaligncl.alignment_loss
  (4) score of a sample -> models.methods.fedaligncl.curriculum_scores
  (pi) order of the samples -> models.methods.fedaligncl.curriculum_order
  (Z) noise on what leaves -> models.methods.fedaligncl.perturb_arrays
  (tau) rounds of an epoch -> models.maths.pacing.epoch_of
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import Notes
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.models.maths.pacing import epoch_of
from fedsilo.models.privacy.gaussian_mechanism import normals

EMBEDDINGS = "embeddings"  # the sender's; other sites' are ``embeddings/<site>``
DISCRIMINATOR = "discriminator/"  # prefix of the sender's arrays
DISCRIMINATORS = "discriminators/"  # prefix of other sites' ``<site>/<array>``
_HIDDEN = 4  # hidden units of the discriminator


@dataclass(frozen=True)
class FedAlignCLSettings(OwnSettings):
    """The method's own settings; ``epoch-steps`` (Q) and ``pace`` (tau) are common ones."""

    title = "Fed-Align-CL"
    tasks = (CLASSIFICATION,)
    why_tasks = "orders samples by the classes that were forgotten"
    server = "fedsilo.strategies.methods.fedaligncl:FedAlignCL"
    site = "fedsilo.client_app.methods.fedaligncl:FedAlignCLSite"
    why_not_private = "sends embeddings of single images, which no noise hides"

    align: bool = setting(True, "adversarial alignment (Fed-Align)")
    curriculum: bool = setting(True, "forgotten samples come earlier (Fed-CL)")
    pretraining_epochs: int = setting(
        0,
        "epochs that each site trains alone, on its own data, before its first round: the paper's "
        "start 'Local'",
        ge=0,
        le=100_000,
    )
    warmup_epochs: int = setting(5, "epochs before alignment and curriculum begin", ge=0)
    forgotten_weight: float = setting(
        2.0, "how much likelier a forgotten sample is sampled, eq. 4", ge=1.0
    )
    alignment_weight: float = setting(1.0, "factor of the alignment loss", gt=0.0)
    align_target: Literal["complement", "others"] = setting(
        "complement",
        "whose discriminators an embedding is a target of, eq. 3: the other sites', which "
        "they then send, or the complement of the site's own",
    )
    shared_embeddings: int = setting(
        64, "noisy embeddings of training images that a site sends each round", ge=2
    )
    embedding_draw: Literal["run", "round"] = setting(
        "run",
        "of which images: the same in all rounds, or others each round, until all had their turn",
    )
    noise_variance: float = setting(
        0.001, "variance of the Gaussian noise on what leaves a site", ge=0.0
    )
    noise_scale: Literal["absolute", "relative"] = setting(
        "absolute", "the variance as given, or as a factor of each array's own standard deviation"
    )

    def aligns(self, epoch: int) -> bool:
        """Tell whether sites align their features in ``epoch``, from 0."""
        return self.align and epoch >= self.warmup_epochs

    def orders(self, epoch: int) -> bool:
        """Tell whether the curriculum orders the samples in ``epoch``, from 0."""
        return self.curriculum and epoch >= self.warmup_epochs

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Check the settings of epochs, precision and warm-up on which FedAlignCL depends.

        The warm-up is the first 'warmup-epochs' epochs, without alignment or curriculum.

        Args:
            common: the run's common settings.
            is_table: ignored.

        Raises:
            SettingError: the settings have one of these faults:

                - 'train.epoch-steps' is 0, so epochs are not counted in steps.
                - Alignment is on and the precision is fp16, which would need a scaled alignment
                  loss.
                - Alignment or the curriculum is on, but the last round is still in the warm-up.
        """
        if not common.epoch_steps:
            raise SettingError(
                "method 'fedaligncl' counts its epochs in steps: set 'train.epoch-steps' (120 in "
                "the paper) and 'train.pace', the steps of a round (40), which divides it"
            )
        if common.precision == "fp16" and self.align:
            raise SettingError(
                "method 'fedaligncl' aligns by a loss that is not scaled, as fp16 needs it: set "
                "'machine.precision' to 'bf16', or to 'fp32'"
            )
        begins = epoch_of(common.rounds, common) >= self.warmup_epochs
        if (self.align or self.curriculum) and not begins:
            raise SettingError(
                f"setting 'fedaligncl.warmup-epochs' is {self.warmup_epochs}, but "
                f"{common.rounds} rounds end in epoch {epoch_of(common.rounds, common)}, counted "
                "from 0: alignment and curriculum would never begin; lower it, or raise 'rounds'"
            )


@dataclass(frozen=True)
class EmbeddingNotes(Notes):
    """The number of noisy embeddings that the reply must contain."""

    embeddings: int = 0


def curriculum_scores(local_right: Tensor, global_right: Tensor, weight: float) -> Tensor:
    """Score samples for Fed-Align-CL's curriculum (eq. 4), in which high scores tend to come early.

    A sample is forgotten if the site's own model classifies it correctly, but the averaged model
    does not. Its score is ``weight``, and the score of any other sample is 1.

    Args:
        local_right: whether the site's own model is right, (n,) bool.
        global_right: whether the averaged model is right, (n,) bool.
        weight: the score of a forgotten sample. Above 1, such samples come earlier.

    Returns:
        The scores, (n,) float64.
    """
    forgotten = local_right & ~global_right
    return torch.where(forgotten, weight, 1.0).double()


def curriculum_order(scores: Tensor, rng: torch.Generator) -> Tensor:
    """Draw a random order of samples for training, in which high scores tend to come early.

    Samples are drawn one by one without replacement, with probabilities proportional to their
    scores. One number per sample is drawn from ``rng``.

    Args:
        scores: the samples' scores, (n,), all above 0.
        rng: the generator.

    Returns:
        The indices of the samples in this order, (n,) int64.
    """
    # Sorting by exponential keys of rate ``scores`` is the same as drawing one by one from the
    # remaining samples (Efraimidis and Spirakis 2006). torch.multinomial takes at most 2^24 samples
    uniform = torch.rand(len(scores), generator=rng, dtype=torch.float64)
    return torch.argsort(-torch.log1p(-uniform) / scores, stable=True)


class Discriminator(nn.Module):
    """Tells a site's own embeddings from other sites': layers c-4-1 with ReLU (paper, table IV)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(channels, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map embeddings (n, c) to logits (n,), which are high for the site's own embeddings."""
        logits: Tensor = self.layers(embeddings)
        return logits.squeeze(1)


def load_discriminator(arrays: Mapping[str, Tensor], channels: int, site: str) -> Discriminator:
    """Build the discriminator that another site sent, from its weights.

    A discriminator is a network that tells one site's embeddings from those of other sites.

    Args:
        arrays: the discriminator's parameters by name.
        channels: the length of an embedding.
        site: the site that sent the discriminator, for errors.

    Returns:
        A new network with these weights, in training mode.

    Raises:
        SiteError: the names or shapes of the arrays do not fit the network, or values are not
            finite.
    """
    discriminator = Discriminator(channels)
    wanted = discriminator.state_dict()
    fits = arrays.keys() == wanted.keys()
    for name, array in arrays.items():
        # If the names differ, `fits` is already False, so an unknown name is not looked up
        fits = fits and array.shape == wanted[name].shape
    if not fits:
        raise SiteError(
            f"the discriminator of site {site} does not take embeddings of {channels} numbers: "
            "all sites need the same 'network.name' and 'network.width'"
        )
    if not all(array.isfinite().all() for array in arrays.values()):
        raise SiteError(
            f"the discriminator of site {site} contains non-finite values: if training has "
            "diverged, lower 'train.learning-rate'"
        )
    discriminator.load_state_dict(arrays)
    return discriminator


def discriminator_loss(discriminator: nn.Module, own: Tensor, other: Tensor) -> Tensor:
    """Compute Fed-Align-CL's loss L_D (eq. 2), which trains a site's discriminator D, a scalar.

    D gives the probability that an embedding is from this site. The loss is -E log D(own) - E log(1
    - D(other)), where E is the mean over a batch.

    Args:
        discriminator: maps embeddings to the logit of D.
        own: the site's own embeddings, (n, c), which do not get a gradient.
        other: embeddings of another site, to which the other site added noise, (m, c).
    """
    # -log sigmoid(z) of a logit z is softplus(-z), which does not overflow
    return softplus(-discriminator(own.detach())).mean() + softplus(discriminator(other)).mean()


def alignment_loss(discriminator: nn.Module, own: Tensor) -> Tensor:
    """Compute Fed-Align-CL's alignment loss (eq. 3) without other sites' discriminators, a scalar.

    The discriminator D gives the probability that an embedding is from this site. The loss is -E
    log D(own) - E log(1 - D(own)), where E is the mean over a batch. It is smallest if D always
    gives 1/2. In eq. 3, another site's discriminator stands in place of 1 - D.

    Args:
        discriminator: maps embeddings to the logit of D. It does not get gradients.
        own: the site's embeddings, (n, c), which get gradients.
    """
    # A site's features are the source for its own discriminator in eq. 3, -E log D(own), and the
    # target for the discriminator of another site, -E log D'(own). D' never leaves its site. It is
    # trained to separate the same two sites the other way round, so 1 - D replaces it. The sum
    # is least at D = 1/2, where the site cannot be distinguished from the others
    with _freeze(discriminator):
        logits = discriminator(own)
    return (softplus(-logits) + softplus(logits)).mean()


def paired_alignment_loss(
    discriminator: nn.Module, others: Sequence[nn.Module], own: Tensor, sent: Tensor
) -> Tensor:
    """Compute Fed-Align-CL's alignment loss (eq. 3) with other sites' discriminators, a scalar.

    A discriminator gives the probability that an embedding is from its site. The loss is -E log
    D(own) minus the mean over the other sites of E log D'(sent). Here D is this site's
    discriminator, D' another site's, and E the mean over a batch. No discriminator gets gradients.

    Args:
        discriminator: maps embeddings to the logit of D.
        others: networks that map embeddings to the logit of D', one for each other site, at least
            one.
        own: the site's embeddings, (n, c), which get gradients.
        sent: the same embeddings with the noise that is added before sending. They get gradients
            too.
    """
    with _freeze(discriminator, *others):
        # The own features are the source of the pair, the sent ones the target at each other site
        source = softplus(-discriminator(own)).mean()
        targets = [softplus(-other(sent)).mean() for other in others]
    return source + torch.stack(targets).mean()


@contextmanager
def _freeze(*modules: nn.Module) -> Iterator[None]:
    """Switch off gradients of the modules' parameters inside a ``with`` block.

    Afterwards they are on again where they were on before. Gradients still flow to the modules'
    inputs, which ``torch.no_grad`` would stop.
    """
    trained = []
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                trained.append(parameter)
                parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def add_noise(own: Tensor, settings: FedAlignCLSettings, rng: torch.Generator) -> Tensor:
    """Add the noise of eq. 3, Z(F(x)), to embeddings (n, c); their gradient stays unchanged."""
    # The noise is a constant for autograd, so the gradient of the sum is that of ``own``
    noisy = perturb_arrays({EMBEDDINGS: own}, {EMBEDDINGS}, settings, rng)[EMBEDDINGS]
    return own + (noisy.to(own.device) - own.detach())


def perturb_arrays(
    arrays: Mapping[str, Tensor],
    names: Collection[str],
    settings: FedAlignCLSettings,
    rng: torch.Generator | None,
) -> dict[str, Tensor]:
    """Add Gaussian noise to the arrays in ``names``, and return all arrays.

    This is not differential privacy, because nothing is clipped. 'noise-scale' decides how strong
    the noise is:

    - "absolute": the noise has the variance 'noise-variance'.
    - "relative": the noise has a standard deviation of 'noise-variance' times that of the array.

    If 'noise-variance' is 0, no array gets noise.

    Args:
        arrays: the arrays by name, which are not changed.
        names: the arrays that get noise. All must be in ``arrays``.
        settings: 'noise-variance' and 'noise-scale'.
        rng: the generator. None takes noise from the operating system.

    Returns:
        All arrays by name. Those with noise are float32 on the CPU. All other arrays are unchanged.
    """
    if not settings.noise_variance:
        return dict(arrays)
    noisy = dict(arrays)
    # Sorted, because the draws follow each other: equal seeds must give equal noise
    for name in sorted(names):
        array = arrays[name].detach().float().cpu()
        noise = normals(array.shape, rng, torch.float32)
        if settings.noise_scale == "relative":
            spread = settings.noise_variance * float(array.std(correction=0))
        else:
            spread = math.sqrt(settings.noise_variance)
        noisy[name] = array + spread * noise
    return noisy
