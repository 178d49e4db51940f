from __future__ import annotations

import torch

from fedsilo.client_app.privacy.blur import blurred


def spread(origin: torch.Tensor, share: torch.Tensor | None, blur: float) -> torch.Tensor:
    """Return the standard deviation of the noise on each number of a change by 2 in row 0."""
    value = origin.clone()
    value[0] += 2.0
    shares = {} if share is None else {"head.weight": share}
    draws = [
        blurred({"expert/a/head.weight": value}, {"expert/a/head.weight": origin}, shares, blur)[
            "expert/a/head.weight"
        ]
        - value
        for _ in range(400)
    ]
    return torch.stack(draws).std(dim=0)


def test_noise_is_in_proportion_to_a_units_change() -> None:
    found = spread(torch.zeros(2, 50), None, 0.5)
    assert abs(found[0].mean() - 1.0) < 0.05
    assert float(found[1].abs().max()) == 0.0, "what did not change tells nothing"


def test_noise_is_as_large_as_what_samples_added() -> None:
    found = spread(torch.zeros(2, 50), torch.tensor([3.0, 3.0], dtype=torch.float64), 0.5)
    assert abs(found[0].mean() - 10**0.5) < 0.15


def test_what_did_not_come_and_statistics_and_counts_stay() -> None:
    arrays = {
        "new": torch.ones(3),
        "bn.running_mean": torch.ones(3),
        "counts": torch.ones(3, dtype=torch.int64),
        "other-shape": torch.ones(3),
    }
    came = {
        "bn.running_mean": torch.zeros(3),
        "counts": torch.zeros(3, dtype=torch.int64),
        "other-shape": torch.zeros(4),
    }
    left = blurred(arrays, came, {}, 1.0)
    assert all(torch.equal(left[name], arrays[name]) for name in arrays)


def test_nobody_can_draw_it_again() -> None:
    torch.manual_seed(0)
    first = blurred({"w": torch.ones(9)}, {"w": torch.zeros(9)}, {}, 1.0)["w"]
    torch.manual_seed(0)
    assert not torch.equal(
        first, blurred({"w": torch.ones(9)}, {"w": torch.zeros(9)}, {}, 1.0)["w"]
    )
