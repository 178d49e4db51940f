"""``fedsilo pretrain``: trains a ViT of an experiment's size centrally, on public images.

The images are the data set's public part, which does not share lesions with any silo. The weights
are written to the file that the experiment's ``vit.backbone-weights`` names, where runs of the
experiment find it.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import collect_unrepeatable_operations, compute_of
from fedsilo.client_app.training.evaluation import in_batches
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import BACKBONES, find_places
from fedsilo.core.files.state_files import save_state
from fedsilo.core.seeding import derive_seed, seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping, keys_with, setting
from fedsilo.datasets.images.image_data_set import ImageDataSet
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.silo.silos import Split
from fedsilo.engines.experiments import read_section, simulation_file
from fedsilo.engines.planning import plan_run
from fedsilo.models.measures.classification_metrics import classification_metrics
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.server_app.config.resources import cores

_SHAPE = keys_with(CommonSettings, "shape")
_FEWEST = 20  # public images
_HELD_OUT = 10  # one in ten public images is held out from training to measure accuracy


@dataclass(frozen=True)
class Pretraining:
    """The recipe of pre-training, from the section ``pretraining`` of the simulation file."""

    epochs: int = setting(100, "passes over the public images", ge=1)
    batch_size: int = setting(64, "images per step", ge=2)
    learning_rate: float = setting(1e-3, "highest step size of AdamW", gt=0.0)
    weight_decay: float = setting(0.05, "decoupled weight decay", ge=0.0)
    warmup_epochs: int = setting(5, "epochs of rising step size, cosine decay after", ge=0)
    drop_path: float = setting(0.1, "stochastic depth", ge=0.0, lt=1.0)
    smoothing: float = setting(0.1, "label smoothing", ge=0.0, lt=1.0)
    target: Literal["nevus", "diagnosis"] = setting(
        "diagnosis", "what dermoscopic images are classified by"
    )
    seed: int = setting(0, "seed of every random number", ge=0)


def plan_pretraining(experiment: str, sources: RunSources) -> tuple[CommonSettings, Pretraining]:
    """Read an experiment's settings, and the recipe for pre-training from its simulation file.

    The recipe is the section ``pretraining`` of the file, with values such as the number of epochs.
    A value that the section lacks has its default, and so have all values without the section.

    Raises:
        SettingError: the experiment is unknown, its network is not a ViT, its data set does not
            have images, or the recipe is malformed.
        DataError: the data set's silos cannot be listed, for example because its folder is missing.
    """
    common = plan_run(experiment, sources)[0].common
    recipe = read_section(simulation_file(sources.file), "pretraining", Pretraining)
    if common.network != "vit" or not isinstance(data_set(common.dataset), ImageDataSet):
        raise SettingError(
            f"experiment '{experiment}' has network '{common.network}' on data set "
            f"'{common.dataset}', but pretraining needs a ViT and public images: name another"
        )
    return common, recipe


def train_backbone(
    common: CommonSettings, recipe: Pretraining, target: Path, say: Callable[[str], None]
) -> None:
    """Train a ViT on the data set's public images, and write its weights to ``target``.

    A linear head is trained with the ViT and then dropped. One in ten images, drawn at random, is
    held out from training. ``target`` also records the recipe, the sizes of the ViT and of the
    images, the number of public images, and the metrics on the images held out.

    Args:
        common: the experiment's settings, which give the ViT's size and the data.
        recipe: the recipe of pre-training, such as the number of epochs.
        target: the file to write.
        say: is called with a line about the images, and during the training with lines of metrics.

    Raises:
        DataError: there are fewer than 20 public images.
        SettingError: training diverged. Nothing is written in this case.
    """
    public, classes = _read_public_images(common, recipe)
    counts = torch.bincount(public.labels, minlength=classes).tolist()
    say(f"{len(public)} public images, classes {counts}, of which one in {_HELD_OUT} is held out")
    trainer = _Trainer(public, classes, common, recipe)
    with collect_unrepeatable_operations(say):
        metrics = trainer.run(say)
    backbone = {}
    # A run with other values of these settings could not load the arrays
    for key, value in as_mapping(common).items():
        if key in _SHAPE:
            backbone[key] = value
    facts = {
        "backbone": backbone,
        "image-size": public.inputs.shape[-1],
        "data": [common.dataset, common.public_share, len(public)],
        "pretraining": as_mapping(recipe),
        "held out": metrics,
    }
    arrays = {name: tensor.cpu().numpy() for name, tensor in trainer.vit.state_dict().items()}
    save_state(target, arrays, facts)


def _read_public_images(common: CommonSettings, recipe: Pretraining) -> tuple[Split, int]:
    """Read the public images of the data set, which belong to no silo, with their labels.

    If the data set has several kinds of labels (setting 'data.target'), ``recipe.target`` is the
    kind to read.

    Returns:
        The images with labels, and the number of classes.

    Raises:
        DataError: there are fewer than 20 public images, the least that pre-training takes.
    """
    chosen = cast(ImageDataSet, data_set(common.dataset))
    if "data.target" in chosen.settings:
        common = dataclasses.replace(common, target=recipe.target)
    places = find_places(common.data_dir, common.cache_dir)
    public = chosen.public(common, places)
    if len(public) < _FEWEST:
        raise DataError(
            f"the public part of '{common.dataset}' has {len(public)} images, but at least "
            f"{_FEWEST} are needed: raise 'split.public-share'"
        )
    return public, len(chosen.classes(common, places))


def backbone_file(common: CommonSettings) -> Path:
    """Return the path of the file with a ViT's weights that 'vit.backbone-weights' gives.

    A relative path is below the folder of backbones in the cache, and an absolute path stays as it
    is. Whether the file exists is not checked.

    Raises:
        SettingError: the setting does not give a file, because it is 'timm', 'random' or an empty
            string.
    """
    named = common.backbone_weights
    if named in ("", "timm", "random"):
        raise SettingError(
            f"setting 'vit.backbone-weights' is '{named}', which is not a file: set it, or give "
            "--save-as FILE"
        )
    return (
        find_places(common.data_dir, common.cache_dir).cache / BACKBONES / Path(named).expanduser()
    )


class _Trainer:
    """Trains a ViT with a linear head on public images.

    One in ten of the images is held out, to measure accuracy.
    """

    def __init__(
        self, public: Split, classes: int, common: CommonSettings, recipe: Pretraining
    ) -> None:
        from fedsilo.models.networks.prompted_vit import build_vit, pixel_scale  # imports timm

        self.public, self.recipe = public, recipe
        self.compute = compute_of(dataclasses.replace(common, threads=cores()))
        self.scaler = self.compute.scaler()
        self.order = torch.Generator().manual_seed(derive_seed(recipe.seed, "pretraining"))
        rows = torch.randperm(len(public), generator=self.order)
        # The same generator also shuffles and augments, so the seed decides the whole training
        self.held_out = rows[::_HELD_OUT]
        self.trained = rows[torch.arange(len(rows)) % _HELD_OUT != 0]
        task = NetworkShape(tuple(public.inputs.shape[1:]), classes)
        with seed_generators(recipe.seed, "pretraining", "weights"):
            self.vit = build_vit(common, task, drop_path_rate=recipe.drop_path)
            head = nn.Linear(self.vit.num_features, classes)
        scale, offset = pixel_scale(self.vit, task.input_shape[0])
        self.scale, self.offset = self.compute.bring(scale), self.compute.bring(offset)
        self.network = self.compute.place(nn.Sequential(self.vit, head))
        self.steps = -(-len(self.trained) // recipe.batch_size)
        self.optimiser = torch.optim.AdamW(
            self.network.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        total, rising = self.steps * recipe.epochs, min(recipe.warmup_epochs / recipe.epochs, 0.9)
        # torch divides by zero if the rise has only one step
        if rising * total <= 1:
            rising = 1e-6
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimiser,
            recipe.learning_rate,
            total_steps=total,
            pct_start=rising,
            cycle_momentum=False,
        )
        self.weights = self.compute.bring(class_weights(public.labels[self.trained], classes))

    def run(self, say: Callable[[str], None]) -> dict[str, float]:
        """Train for all epochs, and return the metrics on the held-out images after the last epoch.

        ``say`` is called with a line of these metrics about ten times during the training, and
        after the last epoch. With fewer than 20 epochs, it is called after each epoch.

        Raises:
            SettingError: the mean loss of an epoch, or the network's output after an epoch, is not
                finite.
        """
        began, recipe, metrics = time.monotonic(), self.recipe, {}
        with seed_generators(recipe.seed, "pretraining", "steps", device=self.compute.device):
            for epoch in range(1, recipe.epochs + 1):
                loss = self._epoch()
                self.network.eval()
                # The loss was computed before the last step, which may have broken the weights
                with torch.no_grad():
                    answers = self._logits(self.public.inputs[self.held_out[:1]])
                if not math.isfinite(loss) or not answers.isfinite().all():
                    raise SettingError(
                        f"pre-training diverged in epoch {epoch}: lower 'learning-rate' in the "
                        "simulation file's 'pretraining'; no weights were written"
                    )
                if epoch % max(recipe.epochs // 10, 1) == 0 or epoch == recipe.epochs:
                    metrics = self._metrics()
                    held_out = ", ".join(f"{key} {value:.3f}" for key, value in metrics.items())
                    seconds = time.monotonic() - began
                    say(f"epoch {epoch}: loss {loss:.3f}; held out: {held_out}; {seconds:.0f} s")
        return metrics

    def _epoch(self) -> float:
        """Train for one epoch on shuffled, augmented images; return the mean loss of its steps."""
        self.network.train()
        loss = 0.0
        shuffled = self.trained[torch.randperm(len(self.trained), generator=self.order)]
        for chosen in torch.split(shuffled, self.recipe.batch_size):
            images = augment(self.public.inputs[chosen], self.order)
            loss += self._step(images, self.public.labels[chosen])
            self.schedule.step()
        return loss / self.steps

    def _step(self, images: Tensor, labels: Tensor) -> float:
        """Take one optimiser step on a batch, with gradients clipped to norm 1.

        The loss is a cross-entropy with class weights and label smoothing.

        Returns:
            The loss of the batch before the step.
        """
        self.optimiser.zero_grad(set_to_none=True)
        with self.compute.autocast():
            logits, targets = self._logits(images), self.compute.bring(labels)
            loss = nn.functional.cross_entropy(
                logits, targets, self.weights, label_smoothing=self.recipe.smoothing
            )
        scaled = self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
        # Unscaled before the clipping, because the norm must be that of the true gradients
        self.scaler.unscale_(self.optimiser)
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return loss.item()

    def _logits(self, images: Tensor) -> Tensor:
        """Compute the logits (n, classes), float32 on the device, for 8-bit images (n, 3, s, s).

        Pixels are scaled as the ViT expects them in a run, so that a run can use the weights as
        they are.
        """
        pixels = float_inputs(self.compute.bring(images)) * self.scale + self.offset
        logits: Tensor = self.network(pixels)
        return logits.float()

    def _metrics(self) -> dict[str, float]:
        """Measure the network on the held-out images.

        The result maps ``accuracy`` and the names of the ``classification_metrics`` to their
        values. The network is put in eval mode, and stays in it.
        """
        self.network.eval()
        parts = []
        with torch.no_grad(), self.compute.autocast():
            for batch in in_batches(self.public.inputs[self.held_out]):
                parts.append(self._logits(batch).softmax(1).cpu())
        probabilities, labels = torch.cat(parts), self.public.labels[self.held_out]
        accuracy = (probabilities.argmax(1) == labels).float().mean().item()
        return {"accuracy": accuracy} | classification_metrics(probabilities, labels)


def class_weights(labels: Tensor, classes: int) -> Tensor:
    """Compute the loss weight of each class, float32 (classes,), from labels (n,).

    A weight is proportional to 1 / sqrt(number of images of the class). A class without images has
    weight 0, and the other weights have mean 1. Rare classes would otherwise be hardly learnt.
    """
    # Seven of ten dermoscopic images are nevi
    counts = torch.bincount(labels, minlength=classes).float()
    weights = torch.where(counts > 0, counts.clamp_min(1).rsqrt(), torch.zeros(()))
    return weights / weights[counts > 0].mean()


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Augment 8-bit images (n, 3, side, side) at random. The shape and the type stay the same.

    Each image takes seven random numbers from ``generator`` for these changes:

    - a turn by a random multiple of 90 degrees, and a mirror image with probability 0.5
    - a cut of a random square of 60 to 100 % of the area, resized to the full side
    - a change of the brightness by up to 20 %, and then of the contrast by up to 20 %
    """
    from torchvision.transforms.v2 import functional as change

    side = images.shape[-1]
    changed = []
    for image in images:
        turn, mirror, area, top, left, light, contrast = torch.rand(7, generator=generator).tolist()
        # The root turns a share of the area into a share of the side
        cut = round(side * (0.6 + 0.4 * area) ** 0.5)
        # Lesions do not have an upright position
        turned = torch.rot90(image, int(4 * turn), (1, 2))
        if mirror < 0.5:
            turned = turned.flip(2)
        y, x = round(top * (side - cut)), round(left * (side - cut))
        cropped = change.resize(turned[:, y : y + cut, x : x + cut], [side, side], antialias=True)
        lit = change.adjust_brightness(cropped, 0.8 + 0.4 * light)
        changed.append(change.adjust_contrast(lit, 0.8 + 0.4 * contrast))
    return torch.stack(changed)
