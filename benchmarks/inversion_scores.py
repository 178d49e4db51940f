"""How near reconstructions come to the hospital's samples, each true one to its best match."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from fedsilo.datasets.shifted.sources import SOURCES

ROW_ERROR = 0.1  # sd per feature, root mean square: below it a row counts as recovered
IMAGE_PSNR = 20.0  # dB, above which an image counts as recovered


def row_distances(truth: Tensor, found: Tensor) -> Tensor:
    """Return the root mean square difference of each pair, (n, m), in sd per feature."""
    return torch.cdist(truth.double(), found.double()) / truth.shape[1] ** 0.5


def recovered_rows(truth: Tensor, found: Tensor) -> int:
    """Return of how many rows of ``truth`` (n, features) some candidate (m, features) is a copy."""
    if not len(found):
        return 0
    return int((row_distances(truth, found).min(1).values < ROW_ERROR).sum())


def row_scores(truth: Tensor, found: Tensor) -> dict[str, float]:
    """Return error and share recovered, rows and reconstructions paired off one to one."""
    rows, columns = linear_sum_assignment(distances := row_distances(truth, found).numpy())
    errors = torch.from_numpy(distances[rows, columns])
    got = int((errors < ROW_ERROR).sum())
    return {"error": float(errors.mean()), "recovered": got / len(truth)}


def image_scores(truth: Tensor, found: Tensor) -> dict[str, float]:
    """Return MSE, PSNR and SSIM on pixels of 0 to 1, and the share recovered, paired off."""
    source = SOURCES["mnist"]
    a, b = (
        (images.float() * source.std[0] + source.mean[0]).clamp(0, 1) for images in (truth, found)
    )
    squares = torch.cdist(a.flatten(1).double(), b.flatten(1).double()).square() / a[0].numel()
    rows, columns = linear_sum_assignment(squares.numpy())
    errors = squares[rows, columns].clamp_min(1e-10)
    psnr = -10 * errors.log10()
    similar = structural_similarity_index_measure(b[columns], a[rows], data_range=1.0)
    return {
        "mse": float(errors.mean()),
        "psnr": float(psnr.mean()),
        "ssim": float(similar),  # type: ignore[arg-type]  # a tensor unless a map is asked for
        "recovered": float((psnr > IMAGE_PSNR).double().mean()),
    }
