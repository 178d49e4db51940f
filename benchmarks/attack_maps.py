"""How much of an image attention maps, and gradients of methods that send weights, give back.

    python benchmarks/attack_maps.py RUN-DIR --csv FILE [--pairs VICTIM:ATTACKER ...]

``RUN-DIR`` is a finished run of FedEvPrompt. The attacker is another site: it has the backbone, its
own prompts, its own training images and the public ones. It learns pixels of maps by ridge
regression on those, all maps by its own network, and applies it to the victim's maps, which the
victim's network made. It also looks for the image that a map was made of among all of the victim's
training images, as one who has an archive would: by the nearest of the maps that its own network
makes of them. ``maps that were sent`` are the last round's M of each class.

Gradients and updates are FedAvg's, of prompts and head and of the whole ViT, in round 1, with known
labels, as the server sees them; a site sees only the mean over sites. Of one image's gradient the
image is sought by Adam (Geiping et al. 2020: cosine distance and total variation, whose weight the
attacker chooses on own images). Who has an archive seeks the nearest gradient, or by least squares
those of which a batch's is the mean. Of an epoch's update: which images were trained on, as their
gradients point against it, compared with test images. Every number is a lower bound.

Pixels are 0 to 1. The floor is the mean of the attacker's images, whatever was sent.
"""

import argparse
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import pandas as pd
import torch
from attack_gradients import (
    by_archive,
    chosen_variation,
    gradients,
    inverted,
    member_auc,
    one_image,
    parts,
    recognised,
)
from torch import Tensor, nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.locations import find_places
from fedsilo.core.seeding import generator, seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.image_data_set import ImageDataSet
from fedsilo.datasets.registry import data_set
from fedsilo.models.maths.dirichlet import vacuity
from fedsilo.models.methods.fedevprompt import FedEvPromptSettings, most_certain
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.runs.finished_run import FinishedRun

RIDGES = (0.1, 1.0, 10.0, 100.0, 1000.0)
_WINDOW = 7  # pixels, of SSIM
_C1, _C2 = 0.01**2, 0.03**2  # Wang et al. 2004, for a range of 1
_HEADER = ["victim", "attacker", "known", "numbers", "images", "candidates", "metric", "mean", "sd"]
PAIRS = ["rosendahl:vidir_modern", "vidir_modern:vidir_molemax", "vidir_molemax:rosendahl"]

Found = tuple[str, int, Mapping[str, Tensor]]  # what was known, its numbers, and metrics of images


def psnr(images: Tensor, found: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio (n,) in dB of images (n, c, h, w) of 0 to 1."""
    return -10 * (images - found).square().flatten(1).mean(dim=1).clamp_min(1e-10).log10()


def ssim(images: Tensor, found: Tensor) -> Tensor:
    """Return the structural similarity (n,) of images (n, c, h, w) of 0 to 1, 1 for the same."""

    def mean(values: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(values, min(_WINDOW, *values.shape[-2:]), stride=1)

    images, found = images.double(), found.double()  # variances are small next to squares
    m1, m2 = mean(images), mean(found)
    v1, v2 = mean(images.square()) - m1.square(), mean(found.square()) - m2.square()
    both = mean(images * found) - m1 * m2
    above = (2 * m1 * m2 + _C1) * (2 * both + _C2)
    return (above / ((m1.square() + m2.square() + _C1) * (v1 + v2 + _C2))).flatten(1).mean(dim=1)


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
    tenth = torch.arange(len(x)) % 10 == 0
    errors = [
        (ridge(x[~tenth], y[~tenth], weight)(x[tenth]) - y[tenth]).square().mean()
        for weight in RIDGES
    ]
    predict = ridge(x, y, RIDGES[int(torch.stack(errors).argmin())])
    size = images.shape[1:]
    return lambda new: predict(features(new)).clamp(0, 1).float().reshape(-1, *size)


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
    lab = FinishedRun.open(run_dir).lab(site)
    return Side(lab, cast(PromptedViT, lab.open()))


def pixels(inputs: Tensor) -> Tensor:
    """Return images as 0 to 1."""
    return (float_inputs(inputs) + 1) / 2


def by_maps(victim: Side, attacker: Side, own: Tensor) -> Iterator[Found]:
    """Yield what the victim's maps give back; ``own`` are the attacker's images."""
    train = victim.lab.silo.train.inputs
    images, every = pixels(train), torch.arange(len(train))
    floor = pixels(own).mean(dim=0, keepdim=True).expand_as(images)
    yield "nothing: mean image", 0, scores(images, floor, images, every)
    maps, candidates = victim.maps(train), attacker.maps(train)
    decoded = decoder(attacker.maps(own), pixels(own))(maps)
    cells = maps.shape[1]
    for name, rows in (("a map", every), ("a map that was sent", victim.sent())):
        yield f"{name}: regression", cells, scores(images[rows], decoded[rows], images, rows)
        by_map = recognised(maps[rows], candidates, rows).float()
        yield f"{name}: nearest map", cells, {"recognised": by_map}


def scores(images: Tensor, found: Tensor, candidates: Tensor, rows: Tensor) -> Mapping[str, Tensor]:
    """Return PSNR, SSIM and whether the nearest candidate is the image itself, (n,) each."""
    nearest = recognised(found, candidates, rows).float()
    return {"psnr": psnr(images, found), "ssim": ssim(images, found), "recognised": nearest}


def by_gradients(
    victim: Side, attacker: Side, floor: Tensor, count: int, steps: int
) -> Iterator[Found]:
    """Yield what gradients and updates of the victim give back, sought from ``floor``.

    ``count`` random training images are inverted, and two of the attacker's before.
    """
    train = victim.lab.silo.train
    rows = torch.randperm(len(train), generator=generator(0, "attack-maps"))
    chosen, images = rows[:count], pixels(train.inputs)
    below = scores(images[chosen], floor.expand(count, *floor.shape[1:]), images, chosen)
    yield "nothing: mean image, for those inverted", 0, below
    all_of_it = {"train_backbone": True, "prompt_sets": "none"}
    for name, changes in (("prompts and head", {}), ("the whole ViT", all_of_it)):
        common = dataclasses.replace(victim.lab.common, method="fedavg", **changes)
        with seed_generators(0, "attack-maps"):
            network = cast(PromptedViT, initial_classifier(common, victim.lab.silo)).eval()
        numbers = sum(p.numel() for p in network.parameters() if p.requires_grad)
        weight = chosen_variation(network, attacker.lab.silo.train, 2 * floor - 1, steps)
        restored = [
            inverted(network, *one_image(train, r), 2 * floor - 1, steps, weight) for r in chosen
        ]
        measured = scores(images[chosen], (torch.cat(restored) + 1) / 2, images, chosen)
        yield f"gradient of {name}, one image: inversion", numbers, measured
        for known, found in by_archive(network, train, rows, count):
            yield f"gradient of {name}, {known}", numbers, {"recognised": found.float()}
        inside = members(victim, network, common)
        yield f"update of {name}, an epoch", numbers, {"member-auc": inside}


def members(victim: Side, network: PromptedViT, common: CommonSettings) -> Tensor:
    """Return, as (1,), how well an epoch's update tells training from test images, as an AUC."""
    silo, before = victim.lab.silo, copy.deepcopy(network)
    instruction = dataclasses.replace(victim.lab.instruction, round=1)
    lab = Lab(victim.lab.session, victim.lab.content, instruction, victim.lab.state_files)
    own = dataclasses.replace(common, optimiser_state="round", local_epochs=1)
    lab.fit(network, settings=own)
    pairs = zip(before.parameters(), network.parameters(), strict=True)
    update = parts([new.detach() - old.detach() for old, new in pairs if old.requires_grad])
    each = torch.cat([gradients(before, split) for split in (silo.train, silo.test)])
    return member_auc(each, update, len(silo.train)).reshape(1)


def attackers_images(attacker: Side) -> Tensor:
    """Return the public images and the attacker's training images (n, c, h, w)."""
    common = attacker.lab.common
    chosen = cast(ImageDataSet, data_set(common.dataset))
    public = chosen.public(common, find_places(common.data_dir, common.cache_dir))
    return torch.cat([public.inputs, attacker.lab.silo.train.inputs])


def with_all(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with rows of all pairs: mean and standard deviation of the pairs' means."""
    each = table.groupby(["known", "numbers", "metric"], sort=False)
    over = each.agg(
        images=("images", "sum"), candidates=("candidates", "sum"), mean=("mean", "mean")
    )
    over["sd"] = each["mean"].std()
    named = over.reset_index().assign(victim="all", attacker="all")
    return pd.concat([table, named[_HEADER]], ignore_index=True)


def main() -> None:
    """Run the attacks of all pairs, print and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="VICTIM:ATTACKER")
    parser.add_argument("--images", type=int, default=5, help="of which gradients are inverted")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    for pair in options.pairs:
        victim, attacker = (side(options.run_dir, site) for site in pair.split(":"))
        own, images = attackers_images(attacker), len(victim.lab.silo.train)
        floor = pixels(own).mean(dim=0, keepdim=True)
        gradients_of = by_gradients(victim, attacker, floor, options.images, options.steps)
        for known, numbers, metrics in itertools.chain(
            by_maps(victim, attacker, own), gradients_of
        ):
            for metric, values in metrics.items():
                mean, sd = values.mean().item(), values.std(correction=0).item()
                sizes = [numbers, len(values), images]
                rows.append([*pair.split(":"), known, *sizes, metric, mean, sd])
            table = with_all(pd.DataFrame(rows, columns=_HEADER))
            write_atomically(options.csv, table.to_csv(index=False, float_format="%.4f"))
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
