"""Runs a method as its users do, notes its batches, and compares it with its reference.

A run has the inline engine, the real strategy and the real ClientApp, messages and checkpoints.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import load_file
from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods import adversarial_alignment
from fedsilo.client_app.methods.adversarial_alignment import Aligner
from fedsilo.client_app.training import loop
from fedsilo.core.files.locations import Places
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import exchanged_arrays
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.reference import small_world
from tests.reference.plain import Batch, Outcome, Problem, Weights

USUAL: dict[str, Value] = {
    "plugin": str(Path(small_world.__file__)),
    "dataset": "small_world:WORLD",
    "network.name": "small_world:build",
    "rounds": 20,
    "train.batch-size": 8,
    "train.local-epochs": 1,
    "train.optimiser": "sgd",
    "train.learning-rate": 0.1,
    "train.mc-passes": 0,
    "server.evaluate-every": 0,
    "machine.device": "cpu",
    "privacy.sums-min-count": 1,
    "seed": 1,
    "run.name": "run",
}


@dataclass(frozen=True)
class Case:
    """A method with settings, and the reference that must agree with it."""

    method: str
    reference: Callable[[Problem], Outcome]
    settings: Mapping[str, Value] = field(default_factory=dict)
    name: str = ""

    @property
    def title(self) -> str:
        """The case's name: the method's, unless it has several."""
        return self.name or self.method


@dataclass
class Noted:
    """What was seen of a run: batches of each training, the order of sites, received arrays."""

    trainings: dict[tuple[int, str], list[list[Batch]]]
    order: dict[int, list[str]]
    received: dict[tuple[int, str], list[Weights]]
    discriminators: dict[str, Weights] = field(default_factory=dict)
    targets: dict[tuple[int, str], list[list[Tensor]]] = field(default_factory=dict)
    now: tuple[int, str] = (0, "")  # round and site of the training that began last


@contextmanager
def noting() -> Iterator[Noted]:
    """Note what sites train on while the block runs."""
    noted = Noted(defaultdict(list), defaultdict(list), defaultdict(list))
    steps = loop._Steps  # not public: batches are nowhere else
    begin, take, receive = steps.__init__, steps.take, Lab.__init__

    def noting_begin(self: Any, training: loop.LocalTraining) -> None:
        begin(self, training)
        number, site = int(training.key[0]), str(training.key[1])
        if site not in noted.order[number]:
            noted.order[number].append(site)
        self.noted, self.split = [], training.split
        noted.now = (number, site)
        noted.trainings[number, site].append(self.noted)

    def noting_take(self: Any, batches: list[Tensor]) -> None:
        for rows in batches:
            self.noted.append((self.split.inputs[rows].double(), self.split.labels[rows]))
        take(self, batches)

    def noting_receive(self: Any, *arguments: Any, **options: Any) -> None:
        receive(self, *arguments, **options)
        arrays = {name: array.double() for name, array in self.arrays().items()}
        noted.received[self.instruction.round, self.site].append(arrays)

    align, judge = Aligner._train_discriminator, adversarial_alignment.discriminator_loss

    def noting_align(self: Aligner, own: Tensor) -> None:
        start = {n: a.double().clone() for n, a in self.discriminator.state_dict().items()}
        noted.discriminators.setdefault(noted.now[1], start)
        noted.targets.setdefault(noted.now, []).append([])
        align(self, own)

    def noting_judge(discriminator: Any, own: Tensor, other: Tensor) -> Tensor:
        noted.targets[noted.now][-1].append(other.double().clone())
        return judge(discriminator, own, other)

    with (
        mock.patch.object(Aligner, "_train_discriminator", noting_align),
        mock.patch.object(adversarial_alignment, "discriminator_loss", noting_judge),
        mock.patch.object(steps, "__init__", noting_begin),
        mock.patch.object(steps, "take", noting_take),
        mock.patch.object(Lab, "__init__", noting_receive),
    ):
        yield noted


def run_method(case: Case, folder: Path) -> tuple[RunSettings, RunDirectory, Noted]:
    """Run the case's method under ``folder``; return its settings, run directory and batches."""
    values = USUAL | {"method": case.method, "run.out": str(folder)} | dict(case.settings)
    settings = resolve(values)
    with noting() as noted, redirect_stdout(StringIO()):
        directory = run_inline(settings, len(small_world.SAMPLES))
    return settings, directory, noted


def problem_of(settings: RunSettings, noted: Noted) -> Problem:
    """Return what the reference of a run trains on."""
    network = build_classifier(
        settings.common, NetworkShape(small_world.SHAPE, small_world.CLASSES)
    )
    network = deepcopy(network).double()
    start = {n: a.detach().clone() for n, a in exchanged_arrays(network).items()}
    data, validation, first = {}, {}, {}
    for site in small_world.SAMPLES:
        silo = small_world.WORLD.load(site, settings.common, Places(None, Path()))
        data[site] = silo.train.inputs.double(), silo.train.labels
        validation[site] = silo.val.inputs.double(), silo.val.labels
        first[site] = next(iter(noted.received[1, site]), {})
    own = {key.partition(".")[2]: v for key, v in settings.as_mapping().items()}
    return Problem(
        network=network,
        start=start,
        first=first,
        data=data,
        validation=validation,
        rate=settings.common.learning_rate,
        rounds=settings.common.rounds,
        # A reference takes batches out of its own lists
        trainings={key: list(trainings) for key, trainings in noted.trainings.items()},
        order=noted.order,
        received=noted.received,
        discriminators=noted.discriminators,
        targets={key: list(batches) for key, batches in noted.targets.items()},
        own=own,
    )


def outcome_of(directory: RunDirectory) -> Outcome:
    """Read a run's model with what else the server keeps, and the newest state of each site."""
    outcome = Outcome(shared=load_file(max(directory.checkpoints.glob("round-*.safetensors"))))
    if directory.file("model.safetensors").is_file():
        outcome.shared |= load_file(directory.file("model.safetensors"))
    for folder in sorted(directory.path.glob("sites/*")):
        outcome.personal[folder.name] = load_file(max(folder.glob("round-*.safetensors")))
    return outcome


@dataclass(frozen=True)
class Compared:
    """A method beside its reference.

    Attributes:
        deviation: the largest deviation over all arrays. An array's is the largest difference
            divided by the largest absolute value, or by 0.01 if that is less.
        changed: the same with one of the case's settings a tenth larger in the reference alone, by
            the setting's key; empty if the method has no number of its own among them.
    """

    deviation: float
    changed: Mapping[str, float] = field(default_factory=dict)


def compare(case: Case, folder: Path, also_changed: bool = False) -> Compared:
    """Run a method and its reference; with ``also_changed`` the reference with other settings too.

    Raises:
        AssertionError: the reference did not use all batches.
    """
    os.environ.setdefault("FEDSILO_CACHE", str(folder / "cache"))
    settings, directory, noted = run_method(case, folder)
    problem, found = problem_of(settings, noted), outcome_of(directory)
    plain = _deviation(case.reference(problem), found)
    left = [key for key, batches in problem.trainings.items() if batches]
    if left:
        raise AssertionError(f"{case.title}: the reference did not use all batches: {left[:3]}")
    changed = {}
    if also_changed:
        for key, value in case.settings.items():
            if isinstance(value, float) and value and not key.startswith("train."):
                other = problem_of(settings, noted)
                own = {**other.own, key.partition(".")[2]: 1.1 * value}
                changed[key] = _deviation(case.reference(replace(other, own=own)), found)
    return Compared(plain, changed)


def _deviation(wanted: Outcome, found: Outcome) -> float:
    """Return the largest deviation over all arrays of ``wanted``; what else was found is left out.

    Raises:
        KeyError: a wanted array was not found.
    """
    pairs = [(wanted.shared, found.shared)]
    for site, arrays in wanted.personal.items():
        pairs.append((arrays, found.personal[site]))
    worst = [0.0]
    for expected, arrays in pairs:
        for name, array in expected.items():
            scale = max(float(array.abs().max()), 0.01)
            worst.append(float((array - arrays[name].double()).abs().max()) / scale)
    return max(worst)
