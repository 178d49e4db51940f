"""References of four of the five papers' own methods; FedEvPrompt's is in ``prompts.py``."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests.reference.averaging import shares_of
from tests.reference.plain import Outcome, Problem, Weights, copied, mean


class Adam:
    """Adam with its usual decays (Kingma and Ba 2015)."""

    def __init__(self, rate: float) -> None:
        self.rate, self.m, self.v = rate, Weights(), Weights()
        self.counts: dict[str, int] = {}

    def step(self, weights: Weights, gradients: Weights) -> Weights:
        """Return the weights after a step."""
        after = copied(weights)
        for name, g in gradients.items():
            count = self.counts[name] = self.counts.get(name, 0) + 1
            self.m[name] = 0.9 * self.m.get(name, 0.0) + 0.1 * g
            self.v[name] = 0.999 * self.v.get(name, 0.0) + 0.001 * g**2
            m = self.m[name] / (1 - 0.9**count)
            v = self.v[name] / (1 - 0.999**count)
            after[name] = weights[name] - self.rate * m / (v.sqrt() + 1e-8)
        return after


def picsr(p: Problem) -> Outcome:
    """Enouen et al. 2024, eq. 1: local experts, then a router that is averaged over the sites.

    Ours, where the paper is silent: f is linear, distances are negated, and the router starts as
    received.
    """
    experts, last = dict.fromkeys(p.sites, p.start), int(p.own["expert-rounds"])
    for number in range(1, last + 1):
        experts = {site: p.sgd(experts[site], p.batches(number, site)) for site in p.sites}
    prototypes = {site: p.data[site][0].mean(0) for site in p.sites}
    received = p.received[last + 1, "a"][0]
    router = {n: a for n, a in received.items() if n.startswith("router/")}

    def loss(h: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
        def f(x: Tensor) -> Tensor:
            embedded = x.flatten(1) @ h["router/embedding.1.weight"].T
            return embedded + h["router/embedding.1.bias"]

        points = f(torch.stack([prototypes[site] for site in p.sites]))
        distances = (f(inputs)[:, None] - points[None]).norm(dim=2)
        scores = -distances @ h["router/importance.weight"].T + h["router/importance.bias"]
        shares = scores.softmax(1)
        with torch.no_grad():
            answers = [p.logits(experts[site], inputs, False).softmax(1) for site in p.sites]
        mixture = (shares[:, :, None] * torch.stack(answers, 1)).sum(1)
        return nn.functional.nll_loss(mixture.log(), labels)

    for number in range(last + 1, p.rounds + 1):
        trained = {}
        for site in p.sites:
            rate = p.own["router-learning-rate"]
            trained[site] = p.sgd(router, p.batches(number, site), loss=loss, rate=rate)
        router = mean(trained, shares_of(p))
    shared = dict(router)
    for site in p.sites:
        shared[f"prototype/{site}"] = prototypes[site]
        shared |= {f"expert/{site}/{n}": a for n, a in experts[site].items()}
    return Outcome(shared)


def fedefm(p: Problem) -> Outcome:
    """Do, Nguyen et al. 2025, eq. 1, 2 and 11 on a complete graph; the closeness of eq. 3.

    Ours: the loss of the labels has the weight 1 - beta, once.
    """
    beta, t = p.own["distillation-beta"], p.own["temperature"]
    own = {site: p.sgd(p.start, p.batches(1, site)) for site in p.sites}
    for number in range(2, p.rounds + 1):
        experts = {site: {} for site in p.sites}
        for host in p.sites:
            for guest in [site for site in p.sites if site != host]:
                experts[guest][host] = p.sgd(own[guest], p.batches(number, host))
        for site in p.sites:

            def loss(y: Weights, x: Tensor, labels: Tensor, site: str = site) -> Tensor:
                log_q = (p.logits(y, x) / t).log_softmax(1)
                value = (1 - beta) * p.loss(y, x, labels)
                for expert in experts[site].values():  # noqa: B023
                    with torch.no_grad():
                        log_p = (p.logits(expert, x) / t).log_softmax(1)
                        near = _closeness(p.features(y, x, False), p.features(expert, x, False))
                    kl = (log_p.exp() * (log_p - log_q)).sum(1).mean()
                    value = value + near * beta * t**2 * kl
                return value

            own[site] = p.sgd(own[site], p.batches(number, site), loss=loss)
    shared = mean(own, dict.fromkeys(own, 1.0))
    return Outcome(shared, {s: {f"own/{n}": a for n, a in own[s].items()} for s in own})


def _closeness(one: Tensor, other: Tensor) -> Tensor:
    """Return the mean over a batch of sum (1 - c) x over the best flow x of two tokens to two."""

    def masses(tokens: Tensor, towards: Tensor) -> Tensor:
        raw = (tokens * towards.mean(1, keepdim=True)).sum(2).clamp(min=0) + 1e-3
        return raw / raw.sum(1, keepdim=True)

    cosine = torch.cosine_similarity(one[:, :, None], other[:, None], dim=3)
    a, b = masses(one, other), masses(other, one)
    # A flow of two to two has one number free, x_00, and the best is at an end of its range
    ends = [(a[:, 0] - b[:, 1]).clamp(min=0), torch.minimum(a[:, 0], b[:, 0])]
    values = []
    for x in ends:
        flow = torch.stack([x, a[:, 0] - x, b[:, 0] - x, b[:, 1] - a[:, 0] + x], 1)
        values.append((cosine.flatten(1) * flow).sum(1))
    return torch.stack(values).amax(0).mean().clamp(min=0)


def uefl(p: Problem) -> Outcome:
    """Zhang, Cao and Liu 2025, eq. 3 to 9; the network has no dropout, so one pass is as many.

    What K-means finds is taken from what the sites get; who gets it is computed here.
    """
    names = list(p.start)
    w = {n: a for n, a in p.first["a"].items() if not n.startswith("codebook.")}
    books = {"codebook.0": p.first["a"]["codebook.0"]}
    used = {site: ["codebook.0"] for site in p.sites}
    ends = int(p.own["iteration-rounds"])
    for number in range(1, p.rounds + 1):
        trained = {}
        for site in p.sites:
            mine = w | {n: books[n] for n in used[site]}
            trained[site] = p.sgd(mine, p.batches(number, site), loss=_codebook_loss(p))
        w = mean({site: _only(trained[site], names) for site in trained}, shares_of(p))
        for book in books:
            users = {s: _only(trained[s], [book]) for s in trained if book in used[s]}
            books[book] = mean(users, shares_of(p))[book]
        if number == ends and number < p.rounds:
            ends += int(p.own["extension-rounds"])
            entropies = {s: _entropy(p, w | {n: books[n] for n in used[s]}, s) for s in p.sites}
            limit = (1 + p.own["gamma"]) * min(entropies.values())
            new = f"codebook.{len(books)}"
            for site in [s for s in p.sites if entropies[s] > limit]:
                used[site] = [*used[site], new]
            for site in p.sites:
                got = p.received[number + 1, site][0]
                given = {n for n in got if n.startswith("codebook.")}
                if given != set(used[site]):
                    raise AssertionError(f"round {number + 1}: {site} got the books {given}")
                books |= {n: got[n] for n in ("codebook.0", new) if n in got}
    return Outcome(w | books)


def _only(arrays: Weights, names: list[str]) -> Weights:
    return {n: arrays[n] for n in names}


def _quantised(y: Weights, tokens: Tensor) -> Tensor:
    """Return the nearest codeword of each token, over all books."""
    codes = torch.cat([y[n] for n in sorted(y) if n.startswith("codebook.")])
    return codes[((tokens[:, :, None] - codes) ** 2).sum(3).argmin(2)]


def _codebook_loss(p: Problem):
    """Return the loss of a batch: cross-entropy, codebook and commitment terms (eq. 5 to 7)."""

    def loss(y: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
        z = p.features(y, inputs)
        c = _quantised(y, z)
        logits = p.head(y, z + (c - z).detach())
        codebook, commitment = ((c - z.detach()) ** 2).mean(), ((z - c.detach()) ** 2).mean()
        return nn.functional.cross_entropy(logits, labels) + codebook + 0.25 * commitment

    return loss


def _entropy(p: Problem, y: Weights, site: str) -> float:
    """Return the mean entropy of a site's predictions on its validation samples (eq. 8)."""
    q = p.head(y, _quantised(y, p.features(y, p.validation[site][0], False))).softmax(1)
    return float(-(q * q.log()).sum(1).mean())


def fedaligncl(p: Problem) -> Outcome:
    """Jimenez-Sanchez et al. 2023, algorithm 1 without noise.

    The curriculum decides the order of samples, which is part of the batches. Adam goes on over
    rounds at each site, and sites weigh the same. Ours: the others' embeddings are those of the
    last round, and in eq. 3 a site's own D judges the same samples the other way round.
    """
    w, optimisers = p.start, {site: Adam(p.rate) for site in p.sites}
    judges = {site: Adam(p.rate) for site in p.sites}
    embeddings = Weights()
    discriminators = {site: p.discriminators.get(site, Weights()) for site in p.sites}
    for number in range(1, p.rounds + 1):
        trained = {}
        for site in p.sites:
            y, adam, d = w, optimisers[site], discriminators[site]
            for inputs, labels in p.batches(number, site):
                y = adam.step(y, p.gradients(y, inputs, labels, p.loss))
                targets: list[Tensor] = []
                if p.targets.get((number, site)):
                    targets = p.targets[number, site].pop(0)
                others = [other for other in p.sites if other != site]
                for other, target in zip(others, targets, strict=bool(targets)):
                    own, sent = p.features(y, inputs).mean(1).detach(), embeddings[other]
                    # Which samples' embeddings is drawn; their values are those of this loop
                    near = sent[torch.cdist(target, sent).argmin(1)]
                    d = judges[site].step(d, _slopes(d, partial(_tell_apart, own, near)))
                if targets:
                    fool = partial(_confuse, p, d, inputs, p.own["alignment-weight"])
                    y = adam.step(y, _slopes(y, fool))
            trained[site], discriminators[site] = y, d
        w = mean(trained, dict.fromkeys(p.sites, 1.0))
        for site in p.sites:
            embeddings[site] = p.features(trained[site], p.data[site][0]).mean(1)
    personal = {}
    for site in p.sites:
        personal[site] = {f"discriminator/{n}": a for n, a in discriminators[site].items()}
    return Outcome(w, personal)


def _logits(d: Weights, rows: Tensor) -> Tensor:
    """Return the discriminator's logit of each row: a layer of four with ReLU, and one output."""
    hidden = (rows @ d["layers.0.weight"].T + d["layers.0.bias"]).relu()
    return hidden @ d["layers.2.weight"].T + d["layers.2.bias"]


def _tell_apart(own: Tensor, others: Tensor, d: Weights) -> Tensor:
    """Return eq. 2: the discriminator finds the site's own embeddings among the others'."""
    sigmoid = nn.functional.logsigmoid
    return -sigmoid(_logits(d, own)).mean() - sigmoid(-_logits(d, others)).mean()


def _confuse(p: Problem, d: Weights, inputs: Tensor, weight: float, y: Weights) -> Tensor:
    """Return eq. 3 at one site."""
    logits, sigmoid = _logits(d, p.features(y, inputs).mean(1)), nn.functional.logsigmoid
    return weight * (-sigmoid(logits).mean() - sigmoid(-logits).mean())


def _slopes(weights: Weights, loss: Callable[[Weights], Tensor]) -> Weights:
    """Return the gradient of ``loss`` at the weights on which it depends."""
    leaves = {n: a.detach().requires_grad_() for n, a in weights.items()}
    found = torch.autograd.grad(loss(leaves), list(leaves.values()), allow_unused=True)
    return {n: g for n, g in zip(leaves, found, strict=True) if g is not None}
