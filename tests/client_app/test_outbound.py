"""What updates in fewer bytes left out: it waits at the site for updates by the same settings."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedsilo.client_app.lab import Lab, Outgoing
from fedsilo.strategies.wire.compressed import Compression
from fedsilo.strategies.wire.reply import shapes

Opened = Callable[..., Lab]
SENT = {"w": np.zeros(4, np.float32)}
HALF = Compression("fp32", 0.5)


def moved(opened: Opened, way: Compression, round_: int, *trained: float) -> list[float]:
    """Return by how much a site's answer moves 'w', which it was sent as zeros and trained."""
    lab = opened("fedavg", SENT, round=round_, evaluate=False)
    lab.session.compression = way
    reply = lab.pack(Outgoing(send={"w": torch.tensor(trained)}))
    found: list[float] = way.reply("s1a", reply, shapes(SENT), SENT).arrays["w"].tolist()
    return found


def test_what_half_of_an_update_left_out_is_added_to_the_next_one(opened: Opened) -> None:
    assert moved(opened, HALF, 1, 4, 3, -2, 1) == [4, 3, 0, 0]
    assert moved(opened, HALF, 2, 0, 0, 0, 0) == [0, 0, -2, 1]
    assert moved(opened, HALF, 3, 0, 0, 0, 0) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "other",
    [
        Compression("bf16", 0.5),
        Compression("int8", 0.5),
        Compression("fp32", 0.25),
        Compression("fp32", 1.0, down="bf16"),
        Compression("fp32", 0.5, feedback=False),
    ],
    ids=str,
)
def test_what_was_left_out_by_other_settings_is_not_added(
    other: Compression, opened: Opened
) -> None:
    assert moved(opened, HALF, 1, 4, 3, -2, 1) == [4, 3, 0, 0]
    assert moved(opened, other, 2, 0, 0, 0, 0) == [0, 0, 0, 0]


def test_a_round_that_is_asked_again_adds_what_the_round_before_it_left_out(
    opened: Opened,
) -> None:
    assert moved(opened, HALF, 1, 4, 3, -2, 1) == [4, 3, 0, 0]
    assert moved(opened, HALF, 2, 0, 0, 0, 0) == [0, 0, -2, 1]
    assert moved(opened, HALF, 2, 0, 0, 0, 0) == [0, 0, -2, 1]
