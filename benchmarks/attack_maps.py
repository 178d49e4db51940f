"""How much of an image attention maps give back, beside the gradients of methods that send weights.

    python benchmarks/attack_maps.py RUN-DIR --csv FILE [--victim SITE] [--attacker SITE]

``RUN-DIR`` is a finished run of FedEvPrompt. The attacker is another site: it has the backbone, its
own prompts, its own training images and the public ones. It learns pixels of maps by ridge
regression on those, all maps by its own network, and applies it to the victim's maps, which the
victim's network made. It also looks for the image that a map was made of among all of the victim's
training images, as one who has an archive would: by the nearest of the maps that its own network
makes of them. ``maps that were sent`` are the last round's M of each class.

Gradients are of one image each, with a known label, at the start of round 1: what leaves in FedAvg
of prompts and head, and of the whole ViT, at its most telling, a step of one image. The image is
sought by Adam, so that its gradient has the direction of the known one (Geiping et al. 2020, cosine
distance and total variation). Other attacks may find more: every figure is a lower bound.

Pixels are 0 to 1. The floor is the mean of the attacker's images, whatever was sent.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pandas as pd
import torch
from torch import Tensor, nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.datasets.images.dataset import ImageDataSet
from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.datasets.io.locations import find_places
from fedsilo.datasets.registry import data_set
from fedsilo.models.contract.seeding import generator, seeded
from fedsilo.models.maths.dirichlet import vacuity
from fedsilo.models.methods.fedevprompt import FedEvPromptSettings, most_certain
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.server_app.studies.finished_site import finished_site

RIDGES = (0.1, 1.0, 10.0, 100.0, 1000.0)
_WINDOW = 7  # pixels, of SSIM
_C1, _C2 = 0.01**2, 0.03**2  # Wang et al. 2004, for a range of 1
_HEADER = ["known", "numbers", "images", "candidates", "metric", "mean", "sd"]
_VARIATION = 1e-3  # weight of total variation


def psnr(images: Tensor, found: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio (n,) in dB of images (n, c, h, w) of 0 to 1."""
    return -10 * (images - found).square().flatten(1).mean(dim=1).clamp_min(1e-10).log10()


def ssim(images: Tensor, found: Tensor) -> Tensor:
    """Return the structural similarity (n,) of images (n, c, h, w) of 0 to 1, 1 for the same."""

    def mean(values: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(values, min(_WINDOW, *values.shape[-2:]), stride=1)

    images, found = images.double(), found.double()  # variances are small beside squares
    m1, m2 = mean(images), mean(found)
    v1, v2 = mean(images.square()) - m1.square(), mean(found.square()) - m2.square()
    both = mean(images * found) - m1 * m2
    above = (2 * m1 * m2 + _C1) * (2 * both + _C2)
    return (above / ((m1.square() + m2.square() + _C1) * (v1 + v2 + _C2))).flatten(1).mean(dim=1)


def recognised(known: Tensor, candidates: Tensor, rows: Tensor) -> Tensor:
    """Tell (n,) for which of ``known`` the nearest candidate is its own, which ``rows`` names."""
    nearest = torch.cdist(known.flatten(1).double(), candidates.flatten(1).double()).argmin(dim=1)
    return nearest == rows


def features(maps: Tensor) -> Tensor:
    """Return what is regressed on, (n, 2 cells): attention over its mean, and its logarithm."""
    relative = maps.double() * maps.shape[1]
    return torch.cat([relative, relative.clamp_min(1e-6).log()], dim=1)


def ridge(x: Tensor, y: Tensor, weight: float) -> Callable[[Tensor], Tensor]:
    """Return the ridge regression of ``y`` (n, k) on ``x`` (n, d), which predicts rows of y.

    Both are centred, and columns of x divided by their standard deviation.
    """
    spread, mean = torch.std_mean(x, dim=0, correction=0)
    spread, target = spread.clamp_min(1e-9), y.mean(dim=0)
    scaled = (x - mean) / spread
    gram = scaled.T @ scaled + weight * torch.eye(x.shape[1], dtype=x.dtype)
    slope = torch.linalg.solve(gram, scaled.T @ (y - target))
    return lambda new: ((new - mean) / spread) @ slope + target


def decoder(maps: Tensor, images: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function of maps to images of 0 to 1, its weight chosen on every tenth image."""
    x, y = features(maps), images.flatten(1).double()
    held = torch.arange(len(x)) % 10 == 0
    errors = [
        (ridge(x[~held], y[~held], weight)(x[held]) - y[held]).square().mean() for weight in RIDGES
    ]
    predict = ridge(x, y, RIDGES[int(torch.stack(errors).argmin())])
    size = images.shape[1:]
    return lambda new: predict(features(new)).clamp(0, 1).float().reshape(-1, *size)


def gradient_of(network: PromptedViT, image: Tensor, label: Tensor, graph: bool) -> list[Tensor]:
    """Return the loss's gradient of one image (1, c, h, w), -1 to 1, by every trained parameter."""
    tokens, _ = network.encode_with_rollout(image)  # fused attention has no second derivative
    loss = network.criterion(network.classify(tokens), label)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, trained, create_graph=graph, allow_unused=True)
    return [part for part in found if part is not None]


def cosine_distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Return 1 - cos of two gradients, each taken as one vector."""
    one, other = (torch.cat([part.flatten() for part in parts]) for parts in (first, second))
    return 1 - (one @ other) / (one.norm() * other.norm()).clamp_min(1e-20)


def inverted(
    network: PromptedViT, image: Tensor, label: Tensor, start: Tensor, steps: int
) -> Tensor:
    """Return an image (1, c, h, w), -1 to 1, of which the gradient points as that of ``image``.

    It is sought from ``start``.
    """
    known = [part.detach() for part in gradient_of(network, image, label, graph=False)]
    sought = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([sought], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        distance = cosine_distance(gradient_of(network, sought, label, graph=True), known)
        rough = sought.diff(dim=2).abs().mean() + sought.diff(dim=3).abs().mean()
        (sought.grad,) = torch.autograd.grad(distance + _VARIATION * rough, sought)
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            sought.clamp_(-1, 1)
    return sought.detach()


@dataclasses.dataclass(frozen=True)
class Side:
    """A site at the end of the run: its network, its training images, and the maps of them."""

    lab: Lab
    network: PromptedViT

    def maps(self, inputs: Tensor) -> Tensor:
        """Return maps (n, cells) by this site's network."""
        own = cast(FedEvPromptSettings, self.lab.session.method.settings)
        renormalise = own.map_prompts == "renormalise"

        def rollout(images: Tensor) -> Tensor:
            return self.network.encode_with_rollout(images, renormalise)[1]

        return over_batches(self.network, inputs, self.lab.compute, rollout)

    def sent(self) -> Tensor:
        """Return the rows of the training images whose maps this site sends."""
        train, vit = self.lab.silo.train, self.network
        vacuities = over_batches(
            vit,
            train.inputs,
            self.lab.compute,
            lambda x: vacuity(vit.classify(vit.encode(x)).exp()),
        )
        most = cast(FedEvPromptSettings, self.lab.session.method.settings).buffer_maps
        classes = torch.unique(train.labels).tolist()
        return torch.cat([most_certain(vacuities, train.labels, c, most) for c in classes])


def side(run_dir: Path, site: str) -> Side:
    """Open a site of a finished run."""
    lab = finished_site(run_dir, site, None, None)
    return Side(lab, cast(PromptedViT, lab.open()))


def pixels(inputs: Tensor) -> Tensor:
    """Return images as 0 to 1."""
    return (float_inputs(inputs) + 1) / 2


def by_maps(
    victim: Side, attacker: Side, own: Tensor
) -> Iterator[tuple[str, int, Tensor, Tensor, Tensor]]:
    """Yield what was known, numbers an image, and PSNR, SSIM and recognition (n,) of each.

    ``own`` are the attacker's images.
    """
    train = victim.lab.silo.train.inputs
    images, every = pixels(train), torch.arange(len(train))
    floor = pixels(own).mean(dim=0, keepdim=True).expand_as(images)
    yield "nothing: mean image", 0, *scores(images, floor, images, every)
    maps, candidates = victim.maps(train), attacker.maps(train)
    decoded = decoder(attacker.maps(own), pixels(own))(maps)
    cells = maps.shape[1]
    for name, rows in (("a map", every), ("a map that was sent", victim.sent())):
        by_picture = scores(images[rows], decoded[rows], images, rows)
        yield f"{name}: regression", cells, *by_picture
        by_map = recognised(maps[rows], candidates, rows).float()
        yield f"{name}: nearest map", cells, *by_picture[:2], by_map


def scores(
    images: Tensor, found: Tensor, candidates: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return PSNR, SSIM and whether the nearest candidate is the image itself, (n,) each."""
    return psnr(images, found), ssim(images, found), recognised(found, candidates, rows).float()


def by_gradients(
    victim: Side, floor: Tensor, count: int, steps: int
) -> Iterator[tuple[str, int, Tensor, Tensor, Tensor]]:
    """Yield the same of gradients of ``count`` random training images, sought from ``floor``."""
    common, train = victim.lab.common, victim.lab.silo.train
    rows = torch.randperm(len(train), generator=generator(0, "attack-maps"))[:count]
    images, start = pixels(train.inputs), 2 * floor - 1
    inputs, labels = float_inputs(train.inputs), train.labels
    whole = {"train_backbone": True, "prompt_sets": "none"}
    for name, changes in (("prompts and head", {}), ("the whole ViT", whole)):
        changed = dataclasses.replace(common, method="fedavg", **changes)
        with seeded(0, "attack-maps"):
            network = cast(PromptedViT, initial_classifier(changed, victim.lab.silo)).eval()
        found = [inverted(network, inputs[r][None], labels[r][None], start, steps) for r in rows]
        numbers = sum(p.numel() for p in network.parameters() if p.requires_grad)
        restored = (torch.cat(found) + 1) / 2
        measured = scores(images[rows], restored, images, rows)
        yield f"gradient of {name}: inversion", numbers, *measured
        own = by_gradient(network, inputs, labels, rows).float()
        yield f"gradient of {name}: nearest gradient", numbers, *measured[:2], own


def by_gradient(network: PromptedViT, inputs: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Tell (n,) for which of ``rows`` the image of the nearest gradient is the image itself."""
    known = [gradient_of(network, inputs[r][None], labels[r][None], graph=False) for r in rows]
    distances = torch.empty(len(rows), len(inputs))
    for column in range(len(inputs)):
        other = gradient_of(network, inputs[column][None], labels[column][None], graph=False)
        distances[:, column] = torch.stack([cosine_distance(one, other) for one in known])
    return distances.argmin(dim=1) == rows


def attackers_images(attacker: Side) -> Tensor:
    """Return the public images and the attacker's training images (n, c, h, w)."""
    common = attacker.lab.common
    chosen = cast(ImageDataSet, data_set(common.dataset))
    public = chosen.public(common, find_places(common.data_dir, common.cache_dir))
    return torch.cat([public.inputs, attacker.lab.silo.train.inputs])


def main() -> None:
    """Run both attacks, print and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--victim", default="rosendahl")
    parser.add_argument("--attacker", default="vidir_modern")
    parser.add_argument("--images", type=int, default=5, help="of which gradients are inverted")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    victim, attacker = (
        side(options.run_dir, options.victim),
        side(options.run_dir, options.attacker),
    )
    own = attackers_images(attacker)
    floor = pixels(own).mean(dim=0, keepdim=True)
    gradients = by_gradients(victim, floor, options.images, options.steps)
    candidates, rows = len(victim.lab.silo.train), []
    for known, numbers, *measured in itertools.chain(by_maps(victim, attacker, own), gradients):
        for metric, values in zip(("psnr", "ssim", "recognised"), measured, strict=True):
            mean, sd = values.mean().item(), values.std().item()
            rows.append([known, numbers, len(values), candidates, metric, mean, sd])
        table = pd.DataFrame(rows, columns=_HEADER)
        write_atomically(options.csv, table.to_csv(index=False, float_format="%.4f"))
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
