"""References of FedPAC, FedDBE and FedCross, from their papers."""

from itertools import combinations

import torch
from torch import Tensor, nn

from tests.reference.averaging import shares_of
from tests.reference.personal import is_head, pulled
from tests.reference.plain import Outcome, Problem, Weights, copied, dot, mean


def fedpac(p: Problem) -> Outcome:
    """Xu, Tong and Huang 2023, algorithm 1, with eq. 8 for each site's own mix of classifiers."""
    w = {n: a for n, a in p.start.items() if not is_head(n)}
    heads = {site: {n: a for n, a in p.start.items() if is_head(n)} for site in p.sites}
    prototypes: Weights = {}

    def embed(y: Weights, inputs: Tensor) -> Tensor:
        return p.features(y, inputs).flatten(1)

    for number in range(1, p.rounds + 1):
        trained, h, v = {}, {}, {}
        sums: Weights = {}
        counts: dict[str, int] = {}
        for site in p.sites:
            inputs, labels = p.data[site]
            h[site], v[site] = _statistics(p, p.features(w, inputs, False).flatten(1), labels)
            y = p.sgd(w | heads[site], p.batches(number, site), only=is_head)
            term = pulled(p.own["alignment-weight"], embed, prototypes)
            body = lambda name: not is_head(name)  # noqa: E731
            y = trained[site] = p.sgd(y, p.batches(number, site), term=term, only=body)
            found = p.features(y, inputs, False).flatten(1)
            for label in labels.unique().tolist():
                rows = found[labels == label]
                sums[str(label)] = sums.get(str(label), torch.zeros(())) + rows.sum(0)
                counts[str(label)] = counts.get(str(label), 0) + len(rows)
        w = {n: a for n, a in mean(trained, shares_of(p)).items() if not is_head(n)}
        prototypes = {label: sums[label] / counts[label] for label in sums}
        for site in p.sites:
            alpha = _best_mix(p.sites, site, h, v)
            heads[site] = {n: a for n, a in mean(trained, alpha).items() if is_head(n)}
    shared = w | {f"prototype/{label}": a for label, a in prototypes.items()}
    for site in p.sites:
        shared |= {f"head/{site}/{n}": a for n, a in heads[site].items()}
    return Outcome(shared)


def _statistics(p: Problem, rows: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Return p(y) E[f | y] by class, and the variance term divided by n."""
    h, spread = torch.zeros(p.classes, rows.shape[1]), 0.0
    for label in labels.unique().tolist():
        own = rows[labels == label]
        share = len(own) / len(rows)
        h[label] = share * own.mean(0)
        spread += share * float((own**2).sum(1).mean()) - float((h[label] ** 2).sum())
    return h, spread / len(rows)


def _best_mix(sites: list[str], site: str, h: Weights, v: dict[str, float]) -> dict[str, float]:
    """Minimise sum alpha_j^2 v_j + |sum alpha_j (h_i - h_j)|^2 on the simplex, face by face."""
    far = torch.stack([(h[site] - h[other]).flatten() for other in sites])
    matrix = far @ far.T + torch.diag(torch.tensor([v[other] for other in sites]))
    best: tuple[float, dict[str, float]] = (float("inf"), {})
    for size in range(1, len(sites) + 1):
        for face in combinations(range(len(sites)), size):
            part = matrix[list(face)][:, list(face)]
            alpha = torch.linalg.solve(part, torch.ones(size))
            alpha = alpha / alpha.sum()
            value = float(alpha @ part @ alpha)
            if (alpha >= 0).all() and value < best[0]:
                best = (value, {sites[j]: float(a) for j, a in zip(face, alpha, strict=True)})
    return best[1]


def feddbe(p: Problem) -> Outcome:
    """Zhang et al. 2023: a bias of each site's own on the features, and a pull of their mean.

    Ours: the period before, which gives the global mean, is round 1, whose weights are averaged.
    The pull is half the mean square, as in the authors' code.
    """
    w, kappa, mu = p.start, p.own["mean-weight"], p.own["mean-momentum"]
    shape = p.features(w, p.data["a"][0]).shape[1:]
    bias = {site: torch.zeros(shape) for site in p.sites}
    goal = torch.zeros(shape)
    for number in range(1, p.rounds + 1):
        trained, means = {}, {}
        for site in p.sites:
            if number == 1:
                trained[site] = p.sgd(w, p.batches(number, site))
                tokens = p.features(trained[site], p.data[site][0], training=False)
                means[site] = {"mean": tokens.mean(0)}
                continue
            running = torch.zeros(shape)
            y = copied(w) | {"bias": bias[site]}
            for inputs, labels in p.batches(number, site):
                state = {"before": running, "goal": goal}

                def loss(y: Weights, x: Tensor, t: Tensor, state: Weights = state) -> Tensor:
                    tokens = p.features(y, x)
                    state["now"] = (1 - mu) * state["before"] + mu * tokens.mean(0)
                    logits = p.head(y, tokens + y["bias"])
                    pull = kappa * (0.5 * (state["now"] - state["goal"]) ** 2).mean()
                    return nn.functional.cross_entropy(logits, t) + pull

                y = p.sgd(y, [(inputs, labels)], loss=loss)
                running = state["now"].detach()
            bias[site] = y.pop("bias")
            trained[site] = y
        w = mean(trained, shares_of(p))
        if number == 1:
            goal = mean(means, shares_of(p))["mean"]
    return Outcome(w, {site: {"bias": bias[site]} for site in p.sites})


def fedcross(p: Problem) -> Outcome:
    """Hu et al. 2024, algorithm 1, with the model of lowest similarity as collaborator.

    Which site trains which model is drawn at the server, and seen from what the sites get.
    """
    alpha, models = p.own["cross-alpha"], [p.start for _ in p.sites]
    for number in range(1, p.rounds + 1):
        free, trained = list(range(len(models))), list(models)
        for site in p.sites:
            got = {n: a for n, a in p.received[number, site][0].items() if n in p.start}
            place = min(free, key=lambda k: float(_far(models[k], got)))
            free.remove(place)
            trained[place] = p.sgd(models[place], p.batches(number, site))
        models = []
        for place, v in enumerate(trained):
            others = [other for k, other in enumerate(trained) if k != place]
            partner = min(others, key=lambda other, v=v: float(_cosine(v, other)))
            models.append({n: alpha * v[n] + (1 - alpha) * partner[n] for n in v})
    names = [str(k) for k in range(len(models))]
    return Outcome(mean(dict(zip(names, models, strict=True)), dict.fromkeys(names, 1.0)))


def _far(one: Weights, other: Weights) -> Tensor:
    far = {n: one[n] - other[n] for n in one}
    return dot(far, far)


def _cosine(one: Weights, other: Weights) -> Tensor:
    return dot(one, other) / (dot(one, one) * dot(other, other)).sqrt()
