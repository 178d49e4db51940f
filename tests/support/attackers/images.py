"""Whole images read off a ViT whose one patch is the image and whose weights the server chose.

The patch's embedding is linear, attention with queries and keys of 0 passes half of it on to the
class token, and layer norm divides it by a number that an entry of known size tells. Digits of 16
by 16 pixels are 8 by 8 ones, enlarged: 64 numbers say all of one.
"""

from typing import Any

import numpy as np
import torch

from tests.support.attackers.asked import Arrays, Asked, Vector
from tests.support.attackers.planes import STEEP, direction_of, edges_for

SMALL, SIDE = 64, 16  # numbers that an image is made of; pixels of a side
KNOWN, BEYOND, BALANCE = SMALL, SMALL + 1, SMALL + 2  # entries of the embedding beside them
TAKEN = SMALL + 3
BINS = 3
SIZES = {"planes": 128, "means": TAKEN + BINS * (SMALL + 1) + 2}
DIGITS: dict[str, Any] = {
    "dataset": "digits",
    "data.standardise": "pooled",  # the default, which means nothing to images
    "split.silos": 3,
    "split.silo-train-size": 222,
    "split.silo-test-size": 60,
}
VIT: dict[str, Any] = {
    "network": "vit",
    "backbone_weights": "random",
    "train_backbone": True,
    "backbone_depth": 1,
    "backbone_heads": 1,
    "backbone_patch": SIDE,
    "prompt_sets": "none",
    "loss": "cross-entropy",
    "optimiser": "sgd",
    "learning_rate": 1e-12,
    "batch_size": 4096,
    "local_steps": 2,
    "dropout": 0.0,
    "mc_passes": 0,
}
_SCALE = 8.0  # of the known entry, about as large as all others together
_LARGE = 1e7  # what makes the last layer norm divide all samples by the same number
_BLOCK, _FC1, _FC2 = (f"encoder.vit.blocks.0.{part}" for part in ("", "mlp.fc1.", "mlp.fc2."))
_SURE = 1e4


def read_images(site: Asked, rng: np.random.Generator, messages: int) -> None:
    """Read images off planes in the first layer of the block's perceptron."""
    direction, size = _contrast(rng), SIZES["planes"]
    for number in range(messages):
        sent = _embedding(direction, size)
        edges = _edges(4 * size, number)
        sent[f"{_FC1}weight"][:, BEYOND] = STEEP
        sent[f"{_FC1}bias"] = -STEEP * edges
        sent[f"{_FC2}weight"][TAKEN] = 1.0
        # Everybody gets one answer with certainty, and whoever has another label a gradient
        sent["head.1.weight"][number % 10, TAKEN] = _LARGE * np.sqrt(2 / size)
        sent["head.1.bias"][number % 10] = _SURE
        if received := site.ask("train", sent):
            site.candidates += _images(np.diff(received[f"{_FC1}weight"], axis=0))


def read_mean_images(site: Asked, rng: np.random.Generator, messages: int) -> None:
    """Read images off FedProto's class means: of those between two planes, entry by entry."""
    direction, size, each = _contrast(rng), SIZES["means"], SMALL + 1
    for number in range(messages):
        sent = _embedding(direction, size)
        for place, edge in enumerate(_edges(BINS, number)):
            # A gate alone, and one for each entry, which adds it
            units = place * (each + 1) + np.arange(each + 1)
            sent[f"{_FC1}weight"][units, BEYOND] = STEEP
            sent[f"{_FC1}bias"][units] = -STEEP * edge
            sent[f"{_FC1}weight"][units[1:], np.arange(each)] = 1.0
            out = TAKEN + place * each + np.arange(each)
            sent[f"{_FC2}weight"][out, units[1:]] = 1.0
            sent[f"{_FC2}weight"][out, units[0]] = -1.0
        sent[f"{_FC2}bias"] /= 1e3  # what leaves is not to be lost beside it
        start = {f"start/{name}": array for name, array in sent.items()}
        for name, mean in (site.ask("train", start) or {}).items():
            if name.startswith("prototype/"):
                sums = mean[TAKEN : TAKEN + BINS * each].reshape(BINS, each)
                site.candidates += _images(np.diff(sums, axis=0))


def _contrast(rng: np.random.Generator) -> Vector:
    """Return a direction (SMALL,) along which an image that is grey all over is 0."""
    direction = direction_of(rng, SMALL)
    return direction - direction.mean()


def _edges(count: int, number: int) -> Vector:
    return 1.3 * edges_for(count, number)


def _enlarging() -> Vector:
    """Return the matrix (pixels, SMALL) that enlarges an image."""
    small = torch.eye(SMALL).reshape(SMALL, 1, 8, 8)
    large = torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear")
    return np.asarray(large.reshape(SMALL, -1).T.double())


def _embedding(direction: Vector, size: int) -> Arrays:
    """Return a network whose class token, before the perceptron, is the image, normalised."""
    sent = {name: np.zeros(shape) for name, shape in _shapes(size).items()}
    image = np.linalg.pinv(_enlarging())
    rows = np.zeros((size, SIDE * SIDE))
    rows[:SMALL], rows[BEYOND] = image, direction @ image
    rows[BALANCE] = -rows.sum(axis=0)  # so that the mean of all entries is 0
    sent["encoder.vit.patch_embed.proj.weight"] = rows.reshape(size, 1, SIDE, SIDE)
    sent["encoder.vit.patch_embed.proj.bias"][[KNOWN, BALANCE]] = _SCALE, -_SCALE
    for norm in (f"{_BLOCK}norm1", f"{_BLOCK}norm2", "encoder.vit.norm"):
        sent[f"{norm}.weight"] += 1
    sent[f"{_BLOCK}attn.qkv.weight"][2 * size :] = np.eye(size)
    sent[f"{_BLOCK}attn.proj.weight"] = 2 * np.eye(size)
    sent[f"{_FC2}bias"][-2:] = _LARGE, -_LARGE
    return sent


def _shapes(size: int) -> dict[str, tuple[int, ...]]:
    linear = {
        f"{_BLOCK}attn.qkv": (3 * size, size),
        f"{_BLOCK}attn.proj": (size, size),
        _FC1[:-1]: (4 * size, size),
        _FC2[:-1]: (size, 4 * size),
        "encoder.vit.patch_embed.proj": (size, 1, SIDE, SIDE),
        "head.1": (10, size),
    }
    norms = {f"{n}": (size,) for n in (f"{_BLOCK}norm1", f"{_BLOCK}norm2", "encoder.vit.norm")}
    shapes = {"encoder.vit.cls_token": (1, 1, size), "encoder.vit.pos_embed": (1, 2, size)}
    for name, shape in {**linear, **norms}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def _images(apart: Vector) -> list[Vector]:
    """Return the image (pixels,) that each row of entries (n, >= SMALL + 1) would be."""
    with np.errstate(all="ignore"):
        small = _SCALE * apart[:, :SMALL] / apart[:, KNOWN : KNOWN + 1]
    found = small[np.isfinite(small).all(axis=1)]
    return list(found @ _enlarging().T)
