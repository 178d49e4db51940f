"""Gradient inversion: rows out of the update of honest weights, those of the run's seed.

Two cheap kinds. A unit's weights over its bias are a mean of the batch's rows by what each pulls
(Phong et al. 2018), one row where a batch has one. And rows and labels are fitted so that their
update is the one that came (Zhu et al. 2019), here by Levenberg and Marquardt.
"""

import numpy as np
import torch
from torch import Tensor, nn

from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import exchanged_arrays
from fedsilo.server_app.config.settings import resolve
from tests.support.attackers.asked import Arrays, Asked
from tests.support.attackers.planes import FEATURES

WIDTH = 64
HONEST = {"network": "mlp", "width": WIDTH, "optimiser": "sgd", "learning_rate": 1e-2}
SMALLEST = {"batch_size": 8, "local_steps": 2}  # what the default floors allow
_RESTARTS, _STEPS = 1, 100


def honest_weights(seed: int) -> Arrays:
    """Return the weights that a run of the seed begins with."""
    values = {"network": "mlp", "width": WIDTH, "dataset": "heart-synthetic", "seed": seed}
    settings = resolve({"method": "fedavg"} | values).common
    network = build_classifier(settings, NetworkShape((FEATURES,), 2))
    return {n: a.numpy().astype(np.float32) for n, a in exchanged_arrays(network).items()}


def read_updates(site: Asked, rng: np.random.Generator, messages: int) -> None:
    """Read rows off updates of honest weights, each of another seed."""
    for number in range(messages):
        sent = honest_weights(number)
        if received := site.ask("train", sent):
            change = {name: received[name] - sent[name] for name in sent}
            weight, bias = (change[f"encoder.layers.0.{part}"] for part in ("weight", "bias"))
            with np.errstate(all="ignore"):
                site.candidates += list(weight / bias[:, None])
            site.candidates += fitted_rows(sent, change, rng)


def fitted_rows(sent: Arrays, change: Arrays, rng: np.random.Generator) -> list[np.ndarray]:
    """Return the rows (16, features) whose two steps of eight have nearest the update that came.

    With so small steps the second one's gradients are nearly those of the first one's weights:
    what is fitted is the gradient of all sixteen rows.
    """
    rate, count = HONEST["learning_rate"], SMALLEST["batch_size"] * SMALLEST["local_steps"]
    scale = -SMALLEST["batch_size"] / float(rate)
    layer, head = "encoder.layers.0", "head.1"
    names = [f"{one}.{part}" for one in (layer, head) for part in ("weight", "bias")]
    goal = torch.cat([torch.from_numpy(change[n] * scale).flatten() for n in names])
    weights = [torch.from_numpy(sent[n]).double() for n in names]

    def residual(guess: Tensor) -> Tensor:
        rows, sure = guess[:, :-1], guess[:, -1]
        return torch.cat([part.flatten() for part in _gradients(weights, rows, sure)]) - goal

    found: list[tuple[float, Tensor]] = []
    for _ in range(_RESTARTS):
        start = torch.from_numpy(rng.normal(size=(count, FEATURES + 1)))
        found.append(_least_squares(residual, start))
    best = min(found, key=lambda one: one[0])[1]
    return list(best[:, :-1].numpy())


def _gradients(weights: list[Tensor], rows: Tensor, sure: Tensor) -> list[Tensor]:
    """Return the summed gradients of rows (n, features) whose labels are 1 with ``sure``'s odds."""
    weight, bias, out, out_bias = weights
    before = rows @ weight.T + bias
    hidden = nn.functional.gelu(before)
    truth = torch.stack([torch.sigmoid(-4 * sure), torch.sigmoid(4 * sure)], dim=1)
    wrong = torch.softmax(hidden @ out.T + out_bias, dim=1) - truth
    slope = 0.5 * (1 + torch.erf(before / 2**0.5))
    slope = slope + before * torch.exp(-before.square() / 2) / (2 * torch.pi) ** 0.5
    pulled = (wrong @ out) * slope
    return [pulled.T @ rows, pulled.sum(0), wrong.T @ hidden, wrong.sum(0)]


def _least_squares(residual, guess: Tensor) -> tuple[float, Tensor]:  # type: ignore[no-untyped-def]
    """Return the least sum of squares found, and where (Levenberg and Marquardt)."""
    damping, shape = 1e-2, guess.shape
    error = float(residual(guess).square().sum())
    for _ in range(_STEPS):
        slopes = torch.func.jacfwd(residual)(guess).reshape(-1, guess.numel())
        normal, pull = slopes.T @ slopes, slopes.T @ residual(guess)
        for _ in range(8):
            step = torch.linalg.solve(normal + damping * torch.eye(len(normal)).double(), pull)
            moved = guess - step.reshape(shape)
            if (after := float(residual(moved).square().sum())) < error:
                guess, error, damping = moved, after, damping / 5
                break
            damping *= 4
        else:
            break
    return error, guess
