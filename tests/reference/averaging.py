"""References of the methods that end with one model, from their papers.

Where a page says that ours departs from the paper, the reference does so too, at a comment.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tests.reference.plain import (
    Outcome,
    Problem,
    Weights,
    copied,
    distance,
    dot,
    is_statistic,
    mean,
    near,
)


def shares_of(p: Problem) -> dict[str, float]:
    """Return n_k / n of each site."""
    return {site: p.share(site) for site in p.sites}


def fedavg(p: Problem) -> Outcome:
    """McMahan et al. 2017, algorithm 1."""
    w = p.start
    for number in range(1, p.rounds + 1):
        trained = {site: p.sgd(w, p.batches(number, site)) for site in p.sites}
        w = mean(trained, shares_of(p))
    return Outcome(w)


def fedprox(p: Problem) -> Outcome:
    """Li et al. 2020, algorithm 2: the loss has mu / 2 |w - w_t|^2."""
    w, mu = p.start, p.own["proximal-mu"]
    for number in range(1, p.rounds + 1):
        trained = {}
        for site in p.sites:
            trained[site] = p.sgd(w, p.batches(number, site), term=near(w, mu))
        w = mean(trained, shares_of(p))
    return Outcome(w)


def fedavgm(p: Problem) -> Outcome:
    """Hsu et al. 2019: v = beta v + delta, w = w + eta v."""
    w, v = p.start, {n: torch.zeros_like(a) for n, a in p.start.items()}
    for number in range(1, p.rounds + 1):
        trained = {site: p.sgd(w, p.batches(number, site)) for site in p.sites}
        average, before = mean(trained, shares_of(p)), w
        w = copied(average)  # running statistics are averaged, without a momentum
        for name in before:
            if is_statistic(name):
                continue
            v[name] = p.own["momentum"] * v[name] + average[name] - before[name]
            w[name] = before[name] + p.own["server-learning-rate"] * v[name]
    return Outcome(w)


def _fedopt(p: Problem, second: Callable[[Tensor, Tensor], Tensor], beta1: float) -> Outcome:
    """Reddi et al. 2021, algorithm 2, with v_{-1} = tau^2."""
    tau, eta = p.own["tau"], p.own["server-learning-rate"]
    w, m = p.start, {n: torch.zeros_like(a) for n, a in p.start.items()}
    v = {n: torch.full_like(a, tau**2) for n, a in p.start.items()}
    for number in range(1, p.rounds + 1):
        trained = {site: p.sgd(w, p.batches(number, site)) for site in p.sites}
        average, before = mean(trained, shares_of(p)), w  # the paper's mean over clients is plain
        w = copied(average)
        for name in before:
            if is_statistic(name):
                continue
            delta = average[name] - before[name]
            m[name] = beta1 * m[name] + (1 - beta1) * delta
            v[name] = second(v[name], delta**2)
            w[name] = before[name] + eta * m[name] / (v[name].sqrt() + tau)
    return Outcome(w)


def fedadam(p: Problem) -> Outcome:
    """FedAdam: v = beta2 v + (1 - beta2) delta^2."""
    return _fedopt(p, lambda v, d: 0.99 * v + 0.01 * d, 0.9)


def fedyogi(p: Problem) -> Outcome:
    """FedYogi: v = v - (1 - beta2) delta^2 sign(v - delta^2)."""
    return _fedopt(p, lambda v, d: v - 0.01 * d * torch.sign(v - d), 0.9)


def fedadagrad(p: Problem) -> Outcome:
    """FedAdagrad: v = v + delta^2."""
    return _fedopt(p, lambda v, d: v + d, 0.0)


def scaffold(p: Problem) -> Outcome:
    """Karimireddy et al. 2020, algorithm 1 with option II, and eta_g.

    Ours: c is the mean of the c_i by samples, and the model moves by samples over steps.
    """
    zero = {n: torch.zeros_like(a) for n, a in p.start.items()}
    x, c, own = p.start, zero, dict.fromkeys(p.sites, zero)
    for number in range(1, p.rounds + 1):
        moved, turned, per_step = {}, {}, {}
        for site in p.sites:
            y, batches = copied(x), p.batches(number, site)
            for inputs, labels in batches:
                gradient = p.gradients(y, inputs, labels, p.loss)
                for name in gradient:
                    y[name] = y[name] - p.rate * (gradient[name] - own[site][name] + c[name])
            scale = len(batches) * p.rate
            after = {n: own[site][n] - c[n] + (x[n] - y[n]) / scale for n in x}
            moved[site] = {n: y[n] - x[n] for n in x}
            turned[site] = {n: after[n] - own[site][n] for n in x}
            own[site], per_step[site] = after, p.share(site) / len(batches)
        step, turn = mean(moved, per_step), mean(turned, shares_of(p))
        x = {n: x[n] + p.own["server-learning-rate"] * step[n] for n in x}
        c = {n: c[n] + turn[n] for n in c}
    return Outcome(x)


def fednova(p: Problem) -> Outcome:
    """Wang et al. 2020, eq. 6 and 7 for SGD: x - tau_eff eta sum p_i d_i, a_i of ones."""
    x = p.start
    for number in range(1, p.rounds + 1):
        d, tau = {}, 0.0
        for site in p.sites:
            batches = p.batches(number, site)
            y = p.sgd(x, batches)
            d[site] = {n: (x[n] - y[n]) / (p.rate * len(batches)) for n in x}
            tau += p.share(site) * len(batches)
        direction = mean(d, shares_of(p))
        x = {n: x[n] - tau * p.rate * direction[n] for n in x}
    return Outcome(x)


def feddyn(p: Problem) -> Outcome:
    """Acar et al. 2021, algorithm 1, the argmin by the run's steps of SGD.

    Ours: means by samples. h_i is the paper's gradient of the last local loss at its end.
    """
    alpha = p.own["regularisation-alpha"]
    zero = {n: torch.zeros_like(a) for n, a in p.start.items()}
    w, h, own = p.start, zero, dict.fromkeys(p.sites, zero)

    def dynamic(w: Weights, linear: Weights, y: Weights, *_: Tensor) -> Tensor:
        return alpha / 2 * distance(y, w) - dot(linear, y)

    for number in range(1, p.rounds + 1):
        trained = {}
        for site in p.sites:
            y = p.sgd(w, p.batches(number, site), term=partial(dynamic, w, own[site]))
            own[site] = {n: own[site][n] - alpha * (y[n] - w[n]) for n in w}
            trained[site] = y
        average = mean(trained, shares_of(p))
        h = {n: h[n] - alpha * (average[n] - w[n]) for n in w}
        w = {n: average[n] - h[n] / alpha for n in w}
    return Outcome(w)


def fedswa(p: Problem) -> Outcome:
    """FedAvg whose final model is the mean after each of the last rounds (Izmailov et al. 2018)."""
    w, last = p.start, {}
    for number in range(1, p.rounds + 1):
        trained = {site: p.sgd(w, p.batches(number, site)) for site in p.sites}
        w = mean(trained, shares_of(p))
        if number > p.rounds - p.own["averaged-rounds"]:
            last[str(number)] = w
    return Outcome(mean(last, dict.fromkeys(last, 1.0)))


def star(p: Problem) -> Outcome:
    """FedEFM's STAR: after a round each silo has the plain mean of all."""
    w = p.start
    for number in range(1, p.rounds + 1):
        trained = {site: p.sgd(w, p.batches(number, site)) for site in p.sites}
        w = mean(trained, dict.fromkeys(p.sites, 1.0))
    return Outcome(w)


def mix(p: Problem) -> Outcome:
    """Pooled data, of which the first site's steps are noted."""
    w = p.start
    for number in range(1, p.rounds + 1):
        w = p.sgd(w, p.batches(number, "a"))
    return Outcome(w)


def cyclic(p: Problem) -> Outcome:
    """Chang et al. 2018: the model goes from site to site, a lap a round."""
    w = p.start
    for number in range(1, p.rounds + 1):
        for site in p.order[number]:
            w = p.sgd(w, p.batches(number, site))
    return Outcome(w)


def moon(p: Problem) -> Outcome:
    """Li, He and Song 2021, eq. 3 and algorithm 1; no term before a site has a previous model.

    Ours: the projection head (two linear layers on the mean token) is beside the classifier.
    """
    mu, tau = p.own["contrast-mu"], p.own["contrast-temperature"]
    w, previous = p.first["a"], {}

    def projected(y: Weights, inputs: Tensor, training: bool) -> Tensor:
        z = p.features(y, inputs, training).mean(dim=1)
        head = [y[n] for n in sorted(y) if n.startswith("projection/")]
        return linear(torch.relu(linear(z, head[0], head[1])), head[2], head[3])

    def linear(z: Tensor, bias: Tensor, matrix: Tensor) -> Tensor:
        return z @ matrix.T + bias

    def contrast(w: Weights, before: Weights, y: Weights, inputs: Tensor, _: Tensor) -> Tensor:
        z = projected(y, inputs, training=True)
        with torch.no_grad():
            z_glob = projected(w, inputs, training=False)
            z_prev = projected(before, inputs, training=False)
        positive = torch.cosine_similarity(z, z_glob, dim=1) / tau
        negative = torch.cosine_similarity(z, z_prev, dim=1) / tau
        both = torch.stack([positive, negative])
        return -mu * (positive - torch.logsumexp(both, dim=0)).mean()

    for number in range(1, p.rounds + 1):
        trained = {}
        for site in p.sites:
            term = None
            if site in previous:
                term = partial(contrast, w, previous[site])
            trained[site] = p.sgd(w, p.batches(number, site), loss=_network_loss(p), term=term)
        previous = trained
        w = mean(trained, shares_of(p))
    return Outcome(w)


def _network_loss(p: Problem) -> Callable[[Weights, Tensor, Tensor], Tensor]:
    """Return the cross-entropy by the network's own arrays, the projection's left out."""

    def loss(y: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
        own = {n: a for n, a in y.items() if not n.startswith("projection/")}
        return p.loss(own, inputs, labels)

    return loss
