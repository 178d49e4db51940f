"""How far a reply is from what was sent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedsilo.strategies.loop.state import SiteReply
from fedsilo.strategies.loop.updates import in_kinds, update, update_norm

Replies = Callable[..., SiteReply]
BEFORE = {"w": np.float32([1, 1]), "n.running_mean": np.float32([0])}


def test_a_norm_is_of_all_named_arrays_together(site_reply: Replies) -> None:
    reply = site_reply("a", {"w": np.float32([4, 5]), "n.running_mean": np.float32([12])})
    assert update_norm(reply, BEFORE, ["w"]) == 5
    assert update_norm(reply, BEFORE, list(BEFORE)) == 13


def test_weights_and_running_figures_are_apart() -> None:
    assert in_kinds(BEFORE) == {"weights": ["w"], "statistics": ["n.running_mean"]}
    assert in_kinds({}) == {}


def test_an_update_is_of_float64(site_reply: Replies) -> None:
    reply = site_reply("a", {"w": np.float32([1 + 2**-20])})
    changed = update(reply, "w", np.float32([1]))
    assert changed.dtype == np.float64
    assert changed == [2**-20]
