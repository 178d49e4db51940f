"""References of the methods that end with a model at each site, from their papers.

Where a page says that ours departs from the paper, the reference does so too, at a comment.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.reference.averaging import shares_of
from tests.reference.plain import Outcome, Problem, Weights, copied, mean, near

Own = Callable[[str], bool]  # whether an array of this name stays at its site


def is_head(name: str) -> bool:
    """Tell whether an array is the last layer's."""
    return name.startswith("head.")


def is_norm(name: str) -> bool:
    """Tell whether an array is batch norm's, which is the third layer of the encoder."""
    return name.startswith("encoder.2.")


def local(p: Problem) -> Outcome:
    """Each site alone."""
    own = dict.fromkeys(p.sites, p.start)
    for number in range(1, p.rounds + 1):
        own = {site: p.sgd(own[site], p.batches(number, site)) for site in p.sites}
    return Outcome(personal=own)


def _partly_shared(
    p: Problem, is_own: Own, train: Callable[[int, str, Weights], Weights]
) -> Outcome:
    """Train, keep the arrays of ``is_own``, average the others."""
    own = dict.fromkeys(p.sites, p.start)
    for number in range(1, p.rounds + 1):
        trained = {site: train(number, site, own[site]) for site in p.sites}
        shared = {n: a for n, a in mean(trained, shares_of(p)).items() if not is_own(n)}
        own = {site: copied(trained[site] | shared) for site in p.sites}
    personal = {s: {n: a for n, a in own[s].items() if is_own(n)} for s in own}
    return Outcome(shared, personal)


def fedper(p: Problem) -> Outcome:
    """Arivazhagan et al. 2019: base layers are averaged, the last layer stays."""
    return _partly_shared(p, is_head, lambda k, site, w: p.sgd(w, p.batches(k, site)))


def fedbn(p: Problem) -> Outcome:
    """Li et al. 2021: all but batch norm is averaged."""
    return _partly_shared(p, is_norm, lambda k, site, w: p.sgd(w, p.batches(k, site)))


def fedrep(p: Problem) -> Outcome:
    """Collins et al. 2021, algorithm 1: steps of the head alone, then steps of the body alone."""

    def train(number: int, site: str, w: Weights) -> Weights:
        w = p.sgd(w, p.batches(number, site), only=is_head)
        return p.sgd(w, p.batches(number, site), only=lambda name: not is_head(name))

    return _partly_shared(p, is_head, train)


def _averaged_then_alone(p: Problem, only: Own) -> Outcome:
    """FedAvg of the arrays of ``only``; in the last rounds each site trains all, alone."""
    w, alone = p.start, p.rounds - int(p.own["finetune-rounds"])
    for number in range(1, alone + 1):
        trained = {site: p.sgd(w, p.batches(number, site), only=only) for site in p.sites}
        w = mean(trained, shares_of(p))
    own, rate = dict.fromkeys(p.sites, w), p.own["finetune-learning-rate"]
    for number in range(alone + 1, p.rounds + 1):
        own = {site: p.sgd(own[site], p.batches(number, site), rate=rate) for site in p.sites}
    return Outcome(w, own)


def fedavg_ft(p: Problem) -> Outcome:
    """FedAvg, then fine-tuning at each site."""
    return _averaged_then_alone(p, lambda _: True)


def fedbabu(p: Problem) -> Outcome:
    """Oh, Kim and Yun 2022: the head stays as initialised until each site fine-tunes all."""
    return _averaged_then_alone(p, lambda name: not is_head(name))


def ditto(p: Problem) -> Outcome:
    """Li et al. 2021, algorithm 1: v's loss has lambda / 2 |v - w|^2, w as received."""
    w, own = p.start, dict.fromkeys(p.sites, p.start)
    for number in range(1, p.rounds + 1):
        trained = {}
        for site in p.sites:
            trained[site] = p.sgd(w, p.batches(number, site))
            own[site] = p.sgd(
                own[site], p.batches(number, site), term=near(w, p.own["personal-lambda"])
            )
        w = mean(trained, shares_of(p))
    return Outcome(w, own)


def apfl(p: Problem) -> Outcome:
    """Deng, Kamani and Mahdavi 2020, algorithm 1 with a constant alpha."""
    alpha, w, own = p.own["mixing-alpha"], p.start, dict.fromkeys(p.sites, p.start)

    def mixed(v: Weights, y: Weights) -> Weights:
        return {n: alpha * v[n] + (1 - alpha) * y[n] for n in v}

    for number in range(1, p.rounds + 1):
        trained = {}
        for site in p.sites:
            y, v = copied(w), copied(own[site])
            for batch in p.batches(number, site):
                # Both steps are from w^(t-1) and v^(t-1); the mixture's gradient is by v
                y_after = p.sgd(y, [batch])
                v = p.sgd(v, [batch], loss=lambda v, x, t, y=y: p.loss(mixed(v, y), x, t))
                y = y_after
            trained[site], own[site] = y, v
        w = mean(trained, shares_of(p))
    return Outcome(w, own)


def pulled(weight: float, to: Callable[[Weights, Tensor], Tensor], aims: Weights):
    """Return a term: weight times the mean over a batch of |output - aim of its label|^2 / size."""

    def term(y: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
        output, far = to(y, inputs), []
        for row, label in zip(output, labels.tolist(), strict=True):
            if str(label) in aims:
                far.append(((row - aims[str(label)]) ** 2).mean())
        return weight * sum(far, torch.zeros(())) / len(labels)

    return term


def fedproto(p: Problem) -> Outcome:
    """Tan et al. 2022, eq. 4 to 8.

    Ours: eq. 6 without its further division by the number of sites; a distance is a mean square.
    """
    own, prototypes = dict.fromkeys(p.sites, p.start), {}
    weight = p.own["prototype-weight"]

    def embed(y: Weights, inputs: Tensor) -> Tensor:
        return p.features(y, inputs).flatten(1)

    for number in range(1, p.rounds + 1):
        sums: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for site in p.sites:
            term = pulled(weight, embed, prototypes)
            own[site] = p.sgd(own[site], p.batches(number, site), term=term)
            inputs, labels = p.data[site]
            for label in labels.unique().tolist():
                found = p.features(own[site], inputs[labels == label], training=False).flatten(1)
                sums[str(label)] = sums.get(str(label), 0) + found.sum(0)
                counts[str(label)] = counts.get(str(label), 0) + len(found)
        prototypes = {label: sums[label] / counts[label] for label in sums}
    return Outcome({f"prototype/{k}": a for k, a in prototypes.items()}, own)


def feddistill(p: Problem) -> Outcome:
    """Seo et al. 2022: a site's logits are pulled to the plain mean of the others' mean logits."""
    own, means = dict.fromkeys(p.sites, p.start), {site: {} for site in p.sites}
    weight = p.own["logit-weight"]
    for number in range(1, p.rounds + 1):
        sent = {}
        for site in p.sites:
            aims = {}
            for label in {k for s in p.sites if s != site for k in means[s]}:
                others = [means[s][label] for s in p.sites if s != site and label in means[s]]
                aims[label] = torch.stack(others).mean(0)
            term = pulled(weight, lambda y, x: p.logits(y, x), aims)
            own[site] = p.sgd(own[site], p.batches(number, site), term=term)
            inputs, labels = p.data[site]
            sent[site] = {}
            for label in labels.unique().tolist():
                found = p.logits(own[site], inputs[labels == label], training=False)
                sent[site][str(label)] = found.mean(0)
        means = sent
    return Outcome(personal=own)


def _mixed(p: Problem, weights: Callable[[int], dict[str, dict[str, float]]]) -> Outcome:
    """Each round a site mixes all models by its row of weights, then trains the mixture."""
    own = dict.fromkeys(p.sites, p.start)
    for number in range(1, p.rounds + 1):
        rows = weights(number)
        mixed = {site: mean({s: own[s] for s in rows[site]}, rows[site]) for site in p.sites}
        own = {site: p.sgd(mixed[site], p.batches(number, site)) for site in p.sites}
    shared = mean(own, dict.fromkeys(own, 1.0))
    return Outcome(shared, {site: _prefixed("own", own[site]) for site in own})


def _prefixed(kind: str, arrays: Weights) -> Weights:
    """Return arrays by the names under which a site keeps several models."""
    return {f"{kind}/{name}": array for name, array in arrays.items()}


def ring_rows(p: Problem) -> dict[str, dict[str, float]]:
    """Return each site's weights on a ring in the order of names: half own, half predecessor's."""
    rows = {}
    for place, site in enumerate(p.sites):
        rows[site] = {site: 0.5, p.sites[place - 1]: 0.5}
    return rows


def ring(p: Problem) -> Outcome:
    """A directed ring with half weights (Marfoq et al. 2020)."""
    return _mixed(p, lambda _: ring_rows(p))


def cdl(p: Problem) -> Outcome:
    """Do, Nguyen et al. 2023: a mixed main model, and a support model that stays.

    Ours: the divergence is of class probabilities; the support model is a copy of the main one
    after round 1.
    """
    beta, own, support = p.own["divergence-beta"], dict.fromkeys(p.sites, p.start), {}
    rows = ring_rows(p)
    for number in range(1, p.rounds + 1):
        mixed = {site: mean({s: own[s] for s in rows[site]}, rows[site]) for site in p.sites}
        for site in p.sites:
            y, batches = mixed[site], p.batches(number, site)
            if number == 1:
                own[site] = p.sgd(y, batches)
                support[site] = own[site]
                continue
            z = support[site]
            for batch in batches:
                after = p.sgd(y, [batch], term=lambda y, x, _, z=z: beta * _kl(p, y, z, x))
                z = p.sgd(z, [batch], loss=lambda z, x, _, y=y: (1 - beta) * _kl(p, z, y, x))
                y = after
            own[site], support[site] = y, z
    shared = mean(own, dict.fromkeys(own, 1.0))
    kept = {}
    for site in p.sites:
        kept[site] = _prefixed("own", own[site]) | _prefixed("support", support[site])
    return Outcome(shared, kept)


def _kl(p: Problem, one: Weights, other: Weights, inputs: Tensor) -> Tensor:
    """Return KL(one || other) of class probabilities, mean over the batch; other is constant."""
    ours = p.logits(one, inputs).log_softmax(1)
    with torch.no_grad():
        theirs = p.logits(other, inputs).log_softmax(1)
    return (ours.exp() * (ours - theirs)).sum(1).mean()


def matcha(p: Problem) -> Outcome:
    """Wang et al. 2019 on the complete graph of three sites, whose matchings are single edges.

    By symmetry each has probability p = budget; E|I - alpha L|^2 is least at 1 / (2 + p).
    Which of them a round uses is drawn at the server, and seen from the models that a site gets.
    """
    alpha = 1 / (2 + p.own["budget"])

    def rows(number: int) -> dict[str, dict[str, float]]:
        found = {}
        for site in p.sites:
            got = {n.split("/")[1] for m in p.received[number, site] for n in m if n.count("/") > 1}
            others = {other: alpha for other in got if other in p.sites and other != site}
            found[site] = {site: 1 - alpha * len(others)} | others
        return found

    return _mixed(p, rows)


def distrans(p: Problem) -> Outcome:
    """Yuan et al. 2022: a learned offset t, two channels (1 - a) x + a t and (1 + a) x - a t.

    Ours: one gradient steps the network and the offset, as in the authors' code.
    """
    w, a = p.first["a"], 0.2

    def loss(y: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
        t = y["offset.weight"].reshape(inputs.shape[1:])
        views = [(1 - a) * inputs + a * t, (1 + a) * inputs - a * t]
        both = torch.cat([p.features(y, view).flatten(1) for view in views], dim=1)
        logits = both @ y["head.logits.weight"].T + y["head.logits.bias"]
        return nn.functional.cross_entropy(logits, labels)

    for number in range(1, p.rounds + 1):
        trained = {}
        for site in p.sites:
            y = copied(w)
            for inputs, labels in p.batches(number, site):
                for name, gradient in p.gradients(y, inputs, labels, loss).items():
                    rate = p.own["offset-learning-rate"] if name == "offset.weight" else p.rate
                    y[name] = y[name] - rate * gradient
            trained[site] = y
        w = mean(trained, shares_of(p))
    return Outcome(w)
