"""``fedsilo pretrain``: a ViT of an experiment's size, trained centrally on public images.

The images are the data set's public part, which shares no lesion with any silo; the weights go to
the file that the experiment's ``backbone-weights`` names, from where its runs take them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from client_app.device import Compute, choose_compute
from datasets.backbones import FOLDER
from datasets.image_silos import ImageDataSet
from datasets.registry import data_set
from datasets.silos import Split
from datasets.sources import find_places
from datasets.storage import save_state
from models.errors import FedsiloError, SettingError
from models.evidence import classification_evidence
from models.networks import Task, float_inputs
from models.schema import as_mapping, setting
from models.seeding import derive_seed, seeded
from models.settings import CommonSettings
from server_app.bars import make_console
from server_app.config import read_section
from server_app.planning import planned, simulation_file

_HELD_OUT = 10  # one in so many public images is never trained on: the printed accuracy is of those


@dataclass(frozen=True)
class Pretraining:
    """How a backbone is trained, from ``pretraining`` in the simulation file."""

    epochs: int = setting(100, "passes over the public images", minimum=1)
    batch_size: int = setting(64, "images per step", minimum=2)
    learning_rate: float = setting(1e-3, "highest step size of AdamW", above=0.0)
    weight_decay: float = setting(0.05, "decoupled weight decay", minimum=0.0)
    warmup_epochs: int = setting(5, "epochs of rising step size, cosine decay after", minimum=0)
    drop_path: float = setting(0.1, "stochastic depth", minimum=0.0, below=1.0)
    smoothing: float = setting(0.1, "label smoothing", minimum=0.0, below=1.0)
    target: str = setting(
        "diagnosis", "what dermoscopic images are told apart by", choices=("nevus", "diagnosis")
    )
    seed: int = setting(0, "seed of every random number", minimum=0)


def pretrain(options: argparse.Namespace) -> None:
    """Train, print a line per tenth of the way, and write the weights at the end.

    Raises:
        FedsiloError: the experiment has no ViT or no public part, or training diverged.
    """
    settings, _ = planned(options.experiment, options)
    common = settings.common
    recipe = read_section(simulation_file(options.file), "pretraining", Pretraining)
    target = _target(common, options.weights)
    chosen = data_set(common.dataset)
    if common.network != "vit" or not isinstance(chosen, ImageDataSet):
        raise SettingError(
            f"experiment '{options.experiment}' is of network '{common.network}' on data set "
            f"'{common.dataset}': there is no ViT to train on public images"
        )
    if "target" in chosen.settings:
        common = dataclasses.replace(common, target=recipe.target)
    places = find_places(common.data_dir, common.cache_dir)
    public = chosen.public(common, places)
    classes = len(chosen.classes(common, places))
    console = make_console()
    counts = torch.bincount(public.labels, minlength=classes).tolist()
    console.print(
        f"{len(public)} public images, classes {counts}, of which one in {_HELD_OUT} is held out",
        highlight=False,
    )
    vit, score = _train(public, classes, common, recipe, console.print)
    facts = {
        "backbone": {k: v for k, v in as_mapping(common).items() if k.startswith("backbone")},
        "image-size": public.inputs.shape[-1],
        "data": [common.dataset, common.public_share, len(public)],
        "pretraining": as_mapping(recipe),
        "held out": score,
    }
    arrays = {name: tensor.cpu().numpy() for name, tensor in vit.state_dict().items()}
    save_state(target, arrays, facts)
    console.print(f"weights: {target}", highlight=False, soft_wrap=True)


def _target(common: CommonSettings, given: Path | None) -> Path:
    """Return where the weights go.

    Raises:
        SettingError: nothing names a file.
    """
    if given is not None:
        return given
    named = common.backbone_weights
    if named in ("", "timm", "random"):
        raise SettingError(
            f"setting 'backbone-weights' is '{named}', which names no file: set it, or give "
            "--weights FILE"
        )
    path = Path(named).expanduser()
    folder = find_places(common.data_dir, common.cache_dir).cache / FOLDER
    return path if path.is_absolute() else folder / path


def _train(
    public: Split, classes: int, common: CommonSettings, recipe: Pretraining, say: Any
) -> tuple[nn.Module, dict[str, float]]:
    """Return the trained ViT and its figures on the held-out images."""
    from models.prompted_vit import build_vit  # imports timm

    compute = choose_compute(common.device, common.precision, os.cpu_count() or 1)
    order = torch.Generator().manual_seed(derive_seed(recipe.seed, "pretraining"))
    rows = torch.randperm(len(public), generator=order)
    held, trained = rows[::_HELD_OUT], rows[torch.arange(len(rows)) % _HELD_OUT != 0]
    task = Task(tuple(public.inputs.shape[1:]), classes)
    with seeded(recipe.seed, "pretraining", "weights"):
        vit = build_vit(common, task, drop_path_rate=recipe.drop_path)
        network = compute.place(nn.Sequential(vit, nn.Linear(vit.num_features, classes)))
    steps = -(-len(trained) // recipe.batch_size)
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser,
        recipe.learning_rate,
        total_steps=steps * recipe.epochs,
        pct_start=max(min(recipe.warmup_epochs / recipe.epochs, 0.9), 1e-6),
        cycle_momentum=False,
    )
    weights = compute.bring(class_weights(public.labels[trained], classes))
    began, score = time.monotonic(), {}
    with seeded(recipe.seed, "pretraining", "steps", device=compute.device):
        for epoch in range(1, recipe.epochs + 1):
            network.train()
            loss = 0.0
            shuffled = trained[torch.randperm(len(trained), generator=order)]
            for chosen in torch.split(shuffled, recipe.batch_size):
                images = augmented(public.inputs[chosen], order)
                labels = public.labels[chosen]
                loss += _step(network, images, labels, weights, recipe, compute, optimiser)
                schedule.step()
            if not loss < float("inf"):
                raise FedsiloError("pre-training diverged: lower its 'learning-rate'")
            if epoch % max(recipe.epochs // 10, 1) == 0 or epoch == recipe.epochs:
                score = _score(network, public, held, compute)
                figures = ", ".join(f"{key} {value:.3f}" for key, value in score.items())
                seconds = time.monotonic() - began
                say(f"epoch {epoch}: loss {loss / steps:.3f}; held out: {figures}; {seconds:.0f} s")
    return vit, score


def _step(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    weights: Tensor,
    recipe: Pretraining,
    compute: Compute,
    optimiser: torch.optim.Optimizer,
) -> float:
    optimiser.zero_grad(set_to_none=True)
    with compute.autocast():
        logits = network(float_inputs(compute.bring(images)))
        loss = nn.functional.cross_entropy(
            logits.float(), compute.bring(labels), weights, label_smoothing=recipe.smoothing
        )
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()
    return loss.item()


def class_weights(labels: Tensor, classes: int) -> Tensor:
    """Return a weight per class, (classes,), by the inverse root of its frequency; mean 1.

    Seven of ten dermoscopic images are nevi: without it the others are hardly learnt. A class
    without images has weight 0.
    """
    counts = torch.bincount(labels, minlength=classes).float()
    weights = torch.where(counts > 0, counts.clamp_min(1).rsqrt(), torch.zeros(()))
    return weights / weights[counts > 0].mean()


def augmented(images: Tensor, draw: torch.Generator) -> Tensor:
    """Return 8-bit images (n, 3, side, side), turned, mirrored, cropped, in other light.

    A lesion has no upright: each image is turned by a multiple of 90 degrees and mirrored. A crop
    of 60 to 100 % of the area is resized; brightness and contrast change by up to 20 %.
    """
    from torchvision.transforms.v2 import functional as change

    side = images.shape[-1]
    found = []
    for image in images:
        turn, mirror, area, top, left, light, contrast = torch.rand(7, generator=draw).tolist()
        cut = round(side * (0.6 + 0.4 * area) ** 0.5)
        turned = torch.rot90(image, int(4 * turn), (1, 2))
        turned = turned.flip(2) if mirror < 0.5 else turned
        y, x = round(top * (side - cut)), round(left * (side - cut))
        cropped = change.resize(turned[:, y : y + cut, x : x + cut], [side, side], antialias=True)
        lit = change.adjust_brightness(cropped, 0.8 + 0.4 * light)
        found.append(change.adjust_contrast(lit, 0.8 + 0.4 * contrast))
    return torch.stack(found)


def _score(network: nn.Module, public: Split, held: Tensor, compute: Compute) -> dict[str, float]:
    network.eval()
    with torch.no_grad(), compute.autocast():
        parts = [
            network(float_inputs(compute.bring(public.inputs[chosen]))).float().softmax(1).cpu()
            for chosen in torch.split(held, 250)
        ]
    probabilities, labels = torch.cat(parts), public.labels[held]
    accuracy = (probabilities.argmax(1) == labels).float().mean().item()
    return {"accuracy": accuracy} | classification_evidence(probabilities, labels)
