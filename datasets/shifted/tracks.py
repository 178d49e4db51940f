"""A silo's images cut into training and validation part, frames of one track on one side.

Frames of a track show one object within a second: a model that has trained on one knows the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.models.contract.errors import DataError

_SHARE = 10  # of a label's tracks one validates

Rows = npt.NDArray[np.int64]


def cut_by_track(tracks: npt.NDArray[Any], validation: int, where: str) -> tuple[Rows, Rows]:
    """Return training and validation rows, ascending.

    Whole tracks validate, from the end on, as long as no more than ``validation`` images do; if
    already the shortest has more, it alone.

    Args:
        tracks: (n,) the track of each image.
        validation: how many images are to validate.
        where: names the silo in errors.

    Raises:
        DataError: all images are of one track.
    """
    numbers, counts = np.unique(tracks, return_counts=True)
    if len(numbers) < 2:
        raise DataError(
            f"{where}: all {len(tracks)} training images are frames of one track, and none is left "
            "to validate: raise 'silo-train-size'"
        )
    size = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    chosen: set[int] = set()
    left = validation
    for track in dict.fromkeys(reversed(tracks.tolist())):
        if size[track] <= left:
            chosen.add(track)
            left -= size[track]
    if not chosen:
        chosen = {int(numbers[counts.argmin()])}
    validates = np.isin(tracks, list(chosen))
    return np.flatnonzero(~validates), np.flatnonzero(validates)


def hold_out_tracks(tracks: npt.NDArray[Any], labels: npt.NDArray[Any]) -> tuple[Rows, Rows]:
    """Return training and validation rows, ascending: a tenth of each label's tracks validates.

    Of a label with fewer tracks one does; its only track trains.
    """
    held: list[int] = []
    for label in np.unique(labels):
        own = list(dict.fromkeys(tracks[labels == label].tolist()))
        count = max(1, len(own) // _SHARE) if len(own) > 1 else 0
        held += own[len(own) - count :]
    validates = np.isin(tracks, held)
    return np.flatnonzero(~validates), np.flatnonzero(validates)
