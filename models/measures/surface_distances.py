"""Distances between the outlines of a predicted and a true mask, in pixels.

The outline of a mask is its pixels that touch a pixel outside the mask by a side, or the edge of
the image.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Distances = npt.NDArray[np.float64]

_PERCENTILE = 95


@dataclass(frozen=True)
class SurfaceDistances:
    """The distances between two outlines, in pixels, 0 or above.

    Attributes:
        average: the mean distance from each outline's pixels to the nearest pixel of the other
            outline, over the pixels of both outlines.
        percentile_95: the larger one of the two directed distances, each of which is the 95th
            percentile over the pixels of one outline (the 95 % Hausdorff distance).
    """

    average: float
    percentile_95: float


def surface_distances(predicted: Mask, truth: Mask) -> SurfaceDistances | None:
    """Measure how far apart the outlines of a predicted and a true mask (h, w) are, in pixels.

    A pixel of a mask belongs to its outline if it shares a side with a pixel outside the mask, or
    with the edge of the image. For each pixel of either outline, the distance to the nearest pixel
    of the other outline is measured.

    If only one mask is empty, both results are the length of the image's diagonal. So a model that
    finds nothing never looks better than a model that misses by a little.

    Returns:
        ``average``, the mean of the distances over the pixels of both outlines, and
        ``percentile_95``, the 95 % Hausdorff distance: the larger of the two outlines' 95th
        percentiles. None if both masks are empty.
    """
    found, exists = bool(predicted.any()), bool(truth.any())
    if not found and not exists:
        return None
    if not found or not exists:
        diagonal = math.hypot(*truth.shape)
        return SurfaceDistances(diagonal, diagonal)
    here, there = _outline(predicted), _outline(truth)
    away, back = _distances_to(there)[here], _distances_to(here)[there]
    farthest = max(np.percentile(away, _PERCENTILE), np.percentile(back, _PERCENTILE))
    average = (away.sum() + back.sum()) / (len(away) + len(back))
    return SurfaceDistances(float(average), float(farthest))


def _outline(mask: Mask) -> Mask:
    """Return the outline of a mask (h, w) as a mask of the same shape."""
    from scipy.ndimage import binary_erosion

    outline: Mask = mask & ~binary_erosion(mask)
    return outline


def _distances_to(outline: Mask) -> Distances:
    """Compute each pixel's distance to the nearest pixel of a non-empty outline, (h, w).

    The unit is pixels. Pixels of the outline have the distance 0.
    """
    # Imported here, because light commands do not measure masks
    from scipy.ndimage import distance_transform_edt

    distances: Distances = distance_transform_edt(~outline)
    return distances
