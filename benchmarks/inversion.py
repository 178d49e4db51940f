"""What a server reads out of a hospital's answers: rows of heart disease, images of 28 x 28.

    python benchmarks/inversion.py rows    --data-dir DIR [--seeds 3] [--csv FILE]
    python benchmarks/inversion.py images  --data-dir DIR [--seeds 1] [--csv FILE]
    python benchmarks/inversion.py weights --data-dir DIR [--seeds 5] [--csv FILE]

``rows`` and ``images``: weights are honest (from the seed, and after rounds of FedAvg), and the
samples are sought whose gradient is what was answered (``inversion_matching.py``). ``weights``:
they are the attacker's (``inversion_weights.py``). What a hospital can do against it is modelled
in ``inversion_victim.py``; the networks, data and training are the app's own.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from inversion_matching import Effort, invert
from inversion_record import Cell, Record
from inversion_scores import image_scores, recovered_rows, row_scores
from inversion_victim import (
    Answer,
    Bounds,
    Hospitals,
    answer,
    crowd,
    drawn,
    open_heart,
    open_mnist,
    settings_of,
    trained_network,
)
from inversion_weights import (
    ATTACKS,
    LAYER,
    REPEATED,
    SHARP_RATE,
    Attack,
    hyperplane_network,
    regression,
)

from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.seeding import generator
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import SiteNetwork

_SIZES = (1, 2, 4, 8, 16, 32)
_BLURS = (0.1, 0.3, 0.5, 1.0)
_MEASURES = ("change", "samples", "both", "layer")
_MESSAGES = (1, 10, 100, 400)
_LEAST = 8
_WIDTH = 512  # hidden units of the malicious mlp: the server chooses them
_COPIES = 256  # units that watch the same: one row is sought with all of them
_PAIRS = 20  # hyperplanes asked twice
_ROW_ATTACKS = {"analytic": Effort(1, 1), "l2": Effort(3, 120), "cosine": Effort(1, 300)}
_VARIATION = 0.1  # weight of an image's total variation
_NONE = {"none": Bounds()}
_BOUNDS = {
    **_NONE,
    "crowd of 8": Bounds(_LEAST),
    **{f"blur {blur}": Bounds(0, blur, "both") for blur in (0.1, 0.5)},
}


@dataclass(frozen=True)
class Tabular:
    """A network for rows, the sizes of one step to try, and those also tried under bounds."""

    name: str
    kind: str
    width: int
    sizes: tuple[int, ...]
    bounded: tuple[int, ...]


_TABULAR = (
    Tabular("logistic", "logistic", 16, _SIZES, ()),
    Tabular("mlp", "mlp", 16, _SIZES, (1, 2, 8)),
    Tabular("mlp of 128", "mlp", 128, (8, 16, 32), (8, 16, 32)),
)


def one_step(values: dict[str, object]) -> CommonSettings:
    """Return the settings of one step of plain SGD over all samples."""
    step = {"batch-size": 4096, "local-epochs": 1, "learning-rate": 0.1}
    return settings_of({**step, **values})


def steps_of(settings: CommonSettings, samples: int) -> int:
    """Return how many steps the training takes over so many samples."""
    return max(1, -(-samples // settings.batch_size))


def rows(options: argparse.Namespace, record: Record) -> None:
    """Seek heart rows by their gradients."""
    heart = open_heart(options.data_dir, options.cache_dir)
    for seed in range(options.seeds):
        for kind, (rounds, state) in itertools.product(_TABULAR, _states(20)):
            values = {"dataset": "heart", "network": kind.kind, "width": kind.width, "seed": seed}
            settings = one_step(values)
            network = trained_network(heart, settings, rounds)
            for count, training in _plans(settings, kind.sizes, (32, len(heart.victim))):
                split = drawn(heart.victim, count, "batch", seed)
                cell = Cell(kind.name, state, _word(training, count), count, "")
                bounded = cell.training == "one step" and count in kind.bounded
                victim = Victim(network, split, training, cell)
                _seek_rows(victim, heart, seed, record, _BOUNDS if bounded else _NONE)
            record.write()


@dataclass(frozen=True)
class Victim:
    """One answer to be inverted: network, samples, training, and the cell it belongs to."""

    network: SiteNetwork
    split: Split
    training: CommonSettings
    cell: Cell

    def told(self) -> Answer:
        """Return what training tells."""
        return answer(self.network, self.split, self.training)

    def sought(
        self, told: Answer, bounds: Bounds, attack: str, effort: Effort, seed: int
    ) -> torch.Tensor:
        """Return the samples that ``attack`` finds in what leaves."""
        left = bounds.leaves(told, 1, generator(seed, "blur"))
        steps = steps_of(self.training, len(self.split))
        gradient = {name: change / steps for name, change in left.items()}
        shape = tuple(self.split.inputs.shape[1:])
        return invert(self.network, gradient, self.split.labels, shape, attack, effort, seed)


def _seek_rows(
    victim: Victim, heart: Hospitals, seed: int, record: Record, bounds: dict[str, Bounds]
) -> None:
    """Record every attack on one answer about rows, and what another hospital's rows score."""
    told, cell, truth = victim.told(), victim.cell, victim.split.inputs
    units = crowd(told.pulls[LAYER if LAYER in told.pulls else "head.1"])
    share = float((units >= _LEAST).double().mean())
    record.add(replace(cell, attack="units with a crowd of 8"), {"share": share})
    known = drawn(heart.others, len(truth), "guess", seed).inputs
    record.add(replace(cell, attack="another hospital's rows"), row_scores(truth, known))
    for attack, effort in _ROW_ATTACKS.items():
        if attack == "cosine" and cell.samples > max(_SIZES):
            continue  # no better than l2, and minutes
        for name, bound in (bounds if attack == "l2" else _NONE).items():
            found = victim.sought(told, bound, attack, effort, seed)
            scores = row_scores(truth, found) if len(found) else {}
            record.add(replace(cell, attack=attack, bounds=name), scores)


def _states(rounds: int) -> tuple[tuple[int, str], ...]:
    """Return rounds of training, and what the network is after them."""
    return (0, "start"), (rounds, "trained")


def _plans(
    settings: CommonSettings, sizes: tuple[int, ...], epochs: tuple[int, ...]
) -> list[tuple[int, CommonSettings]]:
    """Return how many samples are trained on, and how: in one step, or an epoch of batches of 8."""
    batches = replace(settings, batch_size=8)
    return [*((count, settings) for count in sizes), *((count, batches) for count in epochs)]


def _word(training: CommonSettings, count: int) -> str:
    steps = steps_of(training, count)
    return "one step" if steps == 1 else f"epoch of {training.batch_size}"


def images(options: argparse.Namespace, record: Record) -> None:
    """Seek images by their gradients."""
    mnist = open_mnist(options.data_dir, options.cache_dir)
    effort = Effort(1, options.iterations, _VARIATION)
    for seed in range(options.seeds):
        for rounds, state in _states(3):
            settings = one_step({"dataset": "mnist", "network": "conv", "width": 4, "seed": seed})
            network = trained_network(mnist, settings, rounds)
            for count, training in _plans(settings, _SIZES, (32,)):
                split = drawn(mnist.victim, count, "batch", seed)
                cell = Cell("conv", state, _word(training, count), count, "cosine")
                victim = Victim(network, split, training, cell)
                told = victim.told()
                other = image_scores(split.inputs, _same_labels(mnist, split, seed))
                record.add(replace(cell, attack="another hospital's images"), other)
                for name, bounds in (_BOUNDS if count == _LEAST else _NONE).items():
                    found = victim.sought(told, bounds, "cosine", effort, seed)
                    record.add(replace(cell, bounds=name), image_scores(split.inputs, found))
                record.write()


def _same_labels(hospitals: Hospitals, split: Split, seed: int) -> torch.Tensor:
    """Return samples of another hospital with the labels of ``split``."""
    rng, other = generator(seed, "guess"), hospitals.others
    places = [(other.labels == label).nonzero().flatten() for label in split.labels]
    chosen = [p[torch.randint(len(p), (1,), generator=rng)] for p in places]
    return other.inputs[torch.cat(chosen)]


def weights(options: argparse.Namespace, record: Record) -> None:
    """Plant malicious weights and count the rows that leave."""
    heart = open_heart(options.data_dir, options.cache_dir)
    whole = len(heart.victim)
    for seed in range(options.seeds):
        for name in ATTACKS:
            # Fewer rows than these can be told apart by a hyperplane: no gradient of 0
            counts = (whole,) if name == "left-out" else (8, 16, 32, 64, whole)
            for count in counts:
                split = drawn(heart.victim, count, "batch", seed)
                watched = (1, _COPIES) if count == whole and name in REPEATED else (1,)
                for copies in watched:
                    _plant(Attack(name, copies, seed), heart, split, record)
        _asked_twice(heart, seed, record)
        record.write()


def _plant(attack: Attack, heart: Hospitals, split: Split, record: Record) -> None:
    """Record the rows of ``split`` that one attack reads, under each of the bounds."""
    values = {"dataset": "heart", "network": "mlp", "width": _WIDTH, "learning-rate": SHARP_RATE}
    settings = one_step(values)
    network = build_classifier(settings, heart.task)
    known = heart.others.inputs if attack.copies == 1 else split.inputs
    attack.plant(network, known, len(split), regression(split))
    told = answer(network, split, settings)
    label = attack.name if attack.copies == 1 else f"{attack.name}, {attack.copies} copies"
    cell = Cell("mlp", "malicious", "one step", len(split), label)
    for bounds, messages in _grid(full=len(split) == len(heart.victim)):
        left = bounds.leaves(told, messages, generator(attack.seed, messages))
        got = recovered_rows(split.inputs, attack.read(left[LAYER]))
        record.add(replace(cell, bounds=_name(bounds), messages=messages), {"rows": got})


def _grid(full: bool) -> list[tuple[Bounds, int]]:
    """Return the bounds and numbers of messages to try."""
    plain = [(Bounds(), 1), (Bounds(_LEAST), 1)]
    blurred = [Bounds(_LEAST, blur, m) for m in _MEASURES for blur in _BLURS]
    return plain + [(b, t) for b in blurred for t in _MESSAGES] if full else plain


def _name(bounds: Bounds) -> str:
    crowd_of = f"crowd of {bounds.least:.0f}" if bounds.least else "none"
    return f"{crowd_of}, blur {bounds.blur} of {bounds.measure}" if bounds.blur else crowd_of


def _asked_twice(heart: Hospitals, seed: int, record: Record) -> None:
    """Ask ``logistic`` twice by hyperplanes a row apart, in an order that is known or secret."""
    whole = len(heart.victim)
    for count, batch in ((8, 8), (32, 32), (64, 64), (whole, whole), (whole, _LEAST)):
        values = {"dataset": "heart", "network": "logistic", "batch-size": batch}
        # At this rate each row moves the weights by itself, however many are in a batch
        settings = one_step({**values, "learning-rate": float(batch)})
        for order in ("order known", "secret order"):
            secret = order == "secret order"
            pairs = ((seed, pair) for pair in range(_PAIRS))
            found = [_difference(heart, count, settings, pair, secret=secret) for pair in pairs]
            got = recovered_rows(heart.victim.inputs, torch.cat(found))
            word = _word(settings, count)
            cell = Cell("logistic", "malicious", word, count, "asked twice", order, 2 * _PAIRS)
            record.add(cell, {"rows": got})


def _difference(
    heart: Hospitals, count: int, settings: CommonSettings, key: tuple[int, int], *, secret: bool
) -> torch.Tensor:
    """Return the rows (0 to 2, features) in the difference of two answers.

    With a secret order the two are of other samples, unless all of the split is asked.
    """
    rng = generator(key[0], "pair", key[1])
    direction = torch.randn(heart.task.input_shape[0], generator=rng)
    along = (heart.others.inputs @ direction).sort().values
    changes = []
    for which in (0, 1):
        drawing = which if secret else 0
        batch = drawn(heart.victim, count, "twice", *key, drawing)
        network = build_classifier(settings, heart.task)
        place = int(len(along) * (0.5 + which / count))
        hyperplane_network(network, direction, float(along[place]))
        told = answer(network, batch, replace(settings, seed=drawing))
        changes.append(told.changes["head.1"])
    apart = changes[0] - changes[1]
    rows = apart[:, :-1] / apart[:, -1:]
    return rows[rows.isfinite().all(1)]


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for run, seeds in ((rows, 3), (images, 1), (weights, 5)):
        one = commands.add_parser(run.__name__, help=run.__doc__)
        one.add_argument("--data-dir", type=Path, required=True)
        one.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "fedsilo")
        one.add_argument("--csv", type=Path)
        one.add_argument("--seeds", type=int, default=seeds)
        one.add_argument("--iterations", type=int, default=300, help="of an image's search")
        one.set_defaults(run=run)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = Record(options.csv)
    options.run(options, record)
    record.write()


if __name__ == "__main__":
    main()
