"""Fixtures of small data files and of this machine's own log."""

from tests.support.small_images import own_log, small_places, write_idx  # noqa: F401
