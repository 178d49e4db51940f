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
    features. A centroid that few samples dominate is left out, because it could reveal a patient.

    Args:
        tokens: the encoder's outputs.
        settings: the settings of UEFL.
        seed: decides the first centres.
        min_samples: the smallest effective number of samples of a centroid.
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
    """Build the initial codewords of a book, a codebook that several sites share.

    K-means, weighted by the counts, merges the sites' centroids to at most 'uefl.codes' codewords.
    If the sites sent no more centroids than that, the centroids become the codewords unchanged. If
    ``parts`` is empty, 'uefl.codes' codewords are drawn from a normal distribution.

    Args:
        book: the number of the book.
        parts: the sites' centroids with their counts. Empty if no site sent any.
        settings: the settings of UEFL.
        dimension: the length of a codeword.
        seed: the run's seed.
        round_: the last round before the book starts. It is part of K-means' seed.

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

    Without arrays, ``stated`` must be a whole number from 0 to ``codes``. With arrays:

    - The numbers of centroids and of counts must equal ``stated``, and be at most ``codes``.
    - Each count must be a whole number of at least 1.
    - The sum of the counts must be at most ``features``.

    Whether the centroids are finite is not checked here.

    Args:
        arrays: ``centroids`` (k, dimension), and ``counts`` (k,), the number of features behind
            each centroid. Empty if the site only states a number.
        stated: the number k that the reply states.
        codes: the largest number of codewords.
        features: the number of the site's training features. Each segment of a token is a feature.
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
