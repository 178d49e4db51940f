"""Cuts by track, by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import DataError
from fedsilo.datasets.shifted.pools import cut_by_track, hold_out_tracks
from tests.support.errors import refuses


def test_whole_tracks_validate_from_the_end_on_as_long_as_they_fit() -> None:
    # From the end: track 3 (one frame), 0 (three: does not fit), 1 (one: two are full)
    train, val = cut_by_track(np.array([0, 2, 1, 2, 0, 0, 3]), 2, "silo s1a")
    assert val.tolist() == [2, 6]
    assert train.tolist() == [0, 1, 3, 4, 5]


def test_where_no_track_fits_the_shortest_validates() -> None:
    train, val = cut_by_track(np.array([5, 5, 7, 7, 7, 5, 5]), 1, "silo s1a")
    assert val.tolist() == [2, 3, 4]
    assert train.tolist() == [0, 1, 5, 6]


def test_images_of_one_track_are_refused() -> None:
    with refuses(DataError, "s1a", "12", "split.silo-train-size"):
        cut_by_track(np.zeros(12, np.int64), 1, "silo s1a")


@given(tracks=st.lists(st.integers(0, 8), min_size=10, max_size=80), share=st.sampled_from([3, 10]))
def test_no_track_is_on_both_sides_and_no_image_is_lost(tracks: list[int], share: int) -> None:
    held = np.array(tracks)
    if len(set(tracks)) < 2:
        return
    train, val = cut_by_track(held, len(tracks) // share, "silo")
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(len(tracks)))
    assert len(train)
    assert len(val)
    assert not set(held[train].tolist()) & set(held[val].tolist())


def test_of_each_label_a_tenth_of_the_tracks_is_held_out_and_at_least_one() -> None:
    tracks = np.array([0, 0, 1, 1, *range(2, 22), 30, 30])
    labels = np.array([0, 0, 0, 0, *[1] * 20, 2, 2])
    train, val = hold_out_tracks(tracks, labels)
    assert tracks[val].tolist() == [1, 1, 20, 21]
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(26))
