"""The reference of FedEvPrompt: a ViT with prompts written out, its evidence, and the buffer."""

from functools import partial

import torch
from torch import Tensor, nn

from tests.reference.plain import Outcome, Problem, Weights

Buffer = dict[str, dict[int, Tensor]]  # site -> class -> attention maps (m, patches)
HEADS, CLASSES = 2, 3  # of the case's ViT


def fedevprompt(p: Problem) -> Outcome:
    """Hendrix et al. 2024, eq. 1 to 7, by SGD with a rate of their own for the b-prompts.

    Ours, where the paper is silent: evidence is a softplus, maps sum to 1 without the prompts'
    share, and t of the annealing counts the epochs of earlier rounds. The case's patches are single
    pixels, so maps already have the size of the images.
    """
    own, buffer = dict.fromkeys(p.sites, p.start), Buffer()
    for number in range(1, p.rounds + 1):
        maps = Buffer()
        for site in p.sites:
            others = [buffer[other] for other in buffer if other != site]
            annealed = min(1.0, (number - 1) / 10)
            loss = partial(_loss, p, _prior(p, site), annealed, others)
            for inputs, labels in p.batches(number, site):
                own[site] = _step(p, own[site], p.gradients(own[site], inputs, labels, loss))
            maps[site] = _most_certain(p, own[site], site)
        buffer = maps
    shared = {}
    for site, by_class in buffer.items():
        shared |= {f"buffer/{site}/{label}": maps for label, maps in by_class.items()}
    personal = {s: {f"network/{n}": a for n, a in own[s].items()} for s in p.sites}
    return Outcome(shared, personal)


def _step(p: Problem, y: Weights, gradients: Weights) -> Weights:
    after = {}
    for name, array in y.items():
        rate = p.own["basic-learning-rate"] if name == "prompts.b" else p.rate
        after[name] = array - rate * gradients[name]
    return after


def _prior(p: Problem, site: str) -> Tensor:
    """Return W of eq. 3; every class has samples at every site, so no weight is 0."""
    labels = p.data[site][1]
    counts = torch.bincount(labels, minlength=CLASSES).double()
    return CLASSES / (CLASSES - 1) * (1 - counts / len(labels))


def _alpha(y: Weights, token: Tensor, prior: Tensor) -> Tensor:
    """Return the Dirichlet parameters (n, classes): evidence plus prior."""
    logits = token @ y["head.1.weight"].T + y["head.1.bias"]
    return nn.functional.softplus(logits) + prior


def _loss(
    p: Problem,
    prior: Tensor,
    annealed: float,
    others: list[dict[int, Tensor]],
    y: Weights,
    inputs: Tensor,
    labels: Tensor,
) -> Tensor:
    """Return eq. 2 of a batch: evidential loss (eq. 4), and distance to others' maps (eq. 7)."""
    token, maps = _vit(p, y, inputs)
    alpha = _alpha(y, token, prior)
    target = nn.functional.one_hot(labels, CLASSES).double()
    strength = alpha.sum(1, keepdim=True)
    error = (target - alpha / strength) ** 2
    variance = alpha * (strength - alpha) / (strength**2 * (strength + 1))
    misleading = target * prior + (1 - target) * alpha
    value = (error + variance).sum(1) + annealed * _divergence(misleading, prior)
    apart = []
    for drawn, label in zip(maps, labels.tolist(), strict=True):
        distances = [((drawn - by_class[label]) ** 2).sum() for by_class in others]
        apart.append(sum(distances, torch.zeros(())))
    weight = p.own["distillation-weight"] / p.own["buffer-maps"]
    return value.mean() + weight * torch.stack(apart).mean()


def _divergence(alpha: Tensor, prior: Tensor) -> Tensor:
    """Return eq. 5, the divergence of two Dirichlet distributions, (n,)."""
    total = alpha.sum(1)
    value = torch.lgamma(total) - torch.lgamma(prior.sum())
    value = value + (torch.lgamma(prior) - torch.lgamma(alpha)).sum(1)
    return value + ((alpha - prior) * (torch.digamma(alpha) - torch.digamma(total)[:, None])).sum(1)


def _most_certain(p: Problem, y: Weights, site: str) -> dict[int, Tensor]:
    """Return by class the maps of the M training samples with the lowest uncertainty (eq. 6)."""
    inputs, labels = p.data[site]
    token, maps = _vit(p, y, inputs)
    uncertainty = CLASSES / _alpha(y, token, _prior(p, site)).sum(1)
    chosen = {}
    for label in range(CLASSES):
        rows = torch.nonzero(labels == label).flatten()
        best = uncertainty[rows].argsort()[: p.own["buffer-maps"]]
        chosen[label] = maps[rows[best]].detach()
    return chosen


def _vit(p: Problem, y: Weights, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return class tokens (n, c) and attention rollouts (n, patches) of a ViT with prompts."""
    frozen = {n.removeprefix("encoder.vit."): a for n, a in p.network.state_dict().items()}
    pixels = inputs * p.network.scale + p.network.offset  # as the ViT's weights expect them
    kernel, bias = frozen["patch_embed.proj.weight"], frozen["patch_embed.proj.bias"]
    x = nn.functional.conv2d(pixels, kernel, bias, stride=kernel.shape[2:]).flatten(2).mT
    x = torch.cat([frozen["cls_token"].expand(len(x), -1, -1), x], 1) + frozen["pos_embed"]
    rolled = torch.eye(x.shape[1], dtype=x.dtype)
    prompts = torch.cat([y["prompts.b"], y["prompts.t"]])
    for number, prompt in enumerate(prompts):
        block = f"blocks.{number}."
        layer = {n.removeprefix(block): a for n, a in frozen.items() if n.startswith(block)}
        mixed, attention = _attention(layer, _normed(x, layer, "norm1"), prompt)
        x = x + mixed
        hidden = _linear(_normed(x, layer, "norm2"), layer, "mlp.fc1")
        x = x + _linear(nn.functional.gelu(hidden), layer, "mlp.fc2")
        rolled = (attention + torch.eye(x.shape[1], dtype=x.dtype)) / 2 @ rolled
    maps = rolled[:, 0, 1:]
    return _normed(x, frozen, "norm")[:, 0], maps / maps.sum(1, keepdim=True)


def _attention(layer: Weights, h: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """Return eq. 1, and the attention between tokens without the prompts, (n, tokens, tokens)."""
    count, tokens, channels = h.shape
    split = (HEADS, channels // HEADS)
    q, k, v = _linear(h, layer, "attn.qkv").reshape(count, tokens, 3, *split).unbind(2)
    keys, values = prompt.reshape(2, 1, -1, *split).expand(-1, count, -1, -1, -1)
    k, v = torch.cat([keys, k], 1), torch.cat([values, v], 1)
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / split[1] ** 0.5
    shares = scores.softmax(3)
    mixed = torch.einsum("nhqk,nkhd->nqhd", shares, v).flatten(2)
    between = shares.mean(1)[:, :, keys.shape[1] :]
    return _linear(mixed, layer, "attn.proj"), between / between.sum(2, keepdim=True)


def _linear(x: Tensor, layer: Weights, name: str) -> Tensor:
    return x @ layer[f"{name}.weight"].T + layer[f"{name}.bias"]


def _normed(x: Tensor, layer: Weights, name: str) -> Tensor:
    weight, bias = layer[f"{name}.weight"], layer[f"{name}.bias"]
    return nn.functional.layer_norm(x, x.shape[2:], weight, bias, eps=1e-6)
