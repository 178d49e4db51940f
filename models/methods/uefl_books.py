"""The initial codewords of UEFL's books: Gaussian, or centroids of the sites' features."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedsilo.core.errors import SettingError
from fedsilo.core.seeding import derive_seed, generator
from fedsilo.models.maths.federated_kmeans import (
    Centroids,
    FloatArray,
    local_centroids,
    merge_centroids,
)
from fedsilo.models.methods.uefl import UEFLSettings


def gaussian_codebook(codes: int, dimension: int, seed: int, book: int) -> Tensor:
    """Draw standard normal codewords (codes, dimension) from the seed and the book's number."""
    return torch.randn(codes, dimension, generator=generator(seed, "codebook", book))


def cluster_tokens(
    tokens: Tensor, settings: UEFLSettings, seed: int, min_samples: int
) -> Centroids:
    """Cluster a site's tokens into at most 'uefl.codes' centroids by K-means.

    The tokens are (samples, tokens, channels). Each token is first split into 'uefl.segments'
    features. A centroid is left out if its effective number of samples is below ``min_samples``,
    because it could reveal a patient. ``seed`` decides the first centres.
    """
    features = tokens.reshape(-1, tokens.shape[-1] // settings.segments)
    return local_centroids(
        features.numpy(),
        settings.codes,
        seed,
        settings.centroid_min_count,
        each=len(features) // len(tokens),
        min_samples=min_samples,
    )


def start_book(
    book: int,
    parts: list[Centroids],
    settings: UEFLSettings,
    dimension: int,
    seed: int,
    round_: int,
) -> FloatArray:
    """Build the initial codewords of a codebook that several sites share.

    K-means merges the sites' centroids in ``parts``, weighted by their counts. If there are at most
    'uefl.codes' centroids, they become the codewords unchanged. If ``parts`` is empty, 'uefl.codes'
    codewords are drawn from a normal distribution.

    Returns:
        The codewords (n, dimension), float32, with n at most 'uefl.codes'.
    """
    if not parts:
        return gaussian_codebook(settings.codes, dimension, seed, book).numpy()
    # Two merges in one round must not draw the same first centres
    purpose = "merge"
    if book == 0:
        purpose = "refresh"
    seed = derive_seed(seed, purpose, round_)
    return merge_centroids(parts, settings.codes, seed)


def centroid_fault(
    arrays: Mapping[str, FloatArray], stated: float, codes: int, features: float
) -> str | None:
    """Return the fault in a site's reply about its centroids, as a clause, or None without a fault.

    ``arrays`` holds ``centroids`` (k, dimension) and ``counts`` (k,). The counts must be positive
    whole numbers with a sum of at most ``features``. ``stated`` must equal k and be at most
    ``codes``. Without arrays, it may be 0 to ``codes``.
    """
    if not arrays:
        if stated in range(codes + 1):
            return None
        return f"it started {stated:g} codewords, and 'uefl.codes' is {codes}"
    centres, counts = arrays["centroids"], arrays["counts"]
    # Counts are float32 on the wire, but must be whole numbers of 1 or more
    natural = bool((counts >= 1).all() and (counts == np.floor(counts)).all())
    if not len(centres) == len(counts) == stated or not natural:
        return f"{len(centres)} centroids came with counts {counts.tolist()}"
    if len(counts) > codes:
        return f"{len(counts)} centroids came, more than 'uefl.codes' {codes}"
    total = float(counts.sum(dtype=np.float64))
    if total > features:
        return f"its centroids stand for {total:g} features, more than it has"
    return None


def segment_dimension(channels: int, segments: int) -> int:
    """Return the length of a codeword: the number of channels divided by the number of segments.

    Raises:
        SettingError: 'uefl.segments' does not divide the encoder's channels.
    """
    if channels % segments:
        raise SettingError(
            f"'uefl.segments' must divide the encoder's {channels} channels, but is {segments}: "
            "choose a divisor"
        )
    return channels // segments
