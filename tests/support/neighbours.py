"""Two hospitals that differ in one patient, asked the same by the same server.

Where a sum of patients' parts gets its noise, both get what the first one got: what is compared is
everything before the noise, and everything that leaves apart from it. Both draw the same batches
but for the patient, and have the same secret seed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from fedsilo.client_app.app import app
from fedsilo.core.messages import ARRAYS, CONFIG, HELLO, SURVEY, Instruction
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.privacy.release import UNITS, Release
from fedsilo.strategies.wire.records import to_record, unbundle
from tests.support.hospital import Hospital

FEW = 24  # patients of each split: enough for every floor


@dataclass(frozen=True)
class Patient:
    """A patient whom one of the hospitals has."""

    split: str
    place: int  # in it
    values: Sequence[float]
    label: int


@dataclass(frozen=True)
class Question:
    """A message: its kind, its arrays and what its instruction says."""

    kind: str
    arrays: Mapping[str, Any] | None = None
    instruction: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Seen:
    """What a hospital gave.

    Attributes:
        answers: of each message, the bytes of all that left, or the text of the refusal.
        sums: what each release had before its noise, by array.
        charged: of each release bound, noise and how many were paid for.
        ledgers: what was charged after each message.
    """

    answers: list[Any] = field(default_factory=list)
    sums: list[dict[str, Tensor]] = field(default_factory=list)
    charged: list[tuple[float, float, int]] = field(default_factory=list)
    ledgers: list[str] = field(default_factory=list)


def few_of(silo: Silo, patient: Patient | None, out: str = "") -> Silo:
    """Return a silo of few patients; with ``patient`` in place, or without the one at that place.

    Args:
        silo: of which the first patients are taken.
        patient: whom the first hospital has.
        out: the split from which the patient is gone, or empty for the first hospital.
    """
    splits = {}
    for name, split in silo.splits().items():
        source = split if len(split) else silo.test
        size = FEW if len(split) else (1 if patient and patient.split == name else 0)
        inputs, labels = source.inputs[:size].clone(), source.labels[:size].clone()
        if patient and patient.split == name:
            inputs[patient.place % size] = torch.tensor(patient.values, dtype=inputs.dtype)
            labels[patient.place % size] = patient.label
            if out:
                stay = torch.arange(size) != patient.place % size
                inputs, labels = inputs[stay], labels[stay]
        splits[name] = Split(inputs, labels)
    return replace(silo, **splits)


def asked(
    make: Callable[[Path], Hospital],
    home: Path,
    silo: Silo,
    patient: Patient,
    questions: Sequence[Question],
    first: Seen | None = None,
) -> Seen:
    """Return what a hospital gives for questions.

    Args:
        make: makes it in a folder.
        home: the folder.
        silo: of all patients.
        patient: who differs.
        questions: the messages, one after another.
        first: what the hospital with the patient gave, or None if it is this one.
    """
    seen, hospital = Seen(), make(home)
    own = few_of(silo, patient, patient.split if first else "")
    with _coupled(own, patient, seen, first):
        for question in questions:
            seen.answers.append(_answer(hospital, question))
            ledger = home / ".own" / hospital.site / "privacy-ledger.json"
            seen.ledgers.append(ledger.read_text() if ledger.exists() else "")
    return seen


def differences(one: Seen, other: Seen) -> list[str]:
    """Return in what two hospitals differ by more than has been charged; empty if they do not."""
    found = []
    for number, (here, there) in enumerate(zip(one.answers, other.answers, strict=True)):
        if here != there:
            found.append(f"answer {number}: {_apart(here, there)}")
    if one.ledgers != other.ledgers:
        found.append(f"ledgers {one.ledgers} and {other.ledgers}")
    if one.charged != other.charged:
        found.append(f"charged {one.charged} and {other.charged}")
    for number, (here, there) in enumerate(zip(one.sums, other.sums, strict=False)):
        squared = sum(
            int(n) ** 2 for name in here for n in (here[name] - there[name]).flatten().tolist()
        )
        if squared > UNITS**2:
            found.append(f"release {number} moves by {squared**0.5 / UNITS} bounds")
    return found


def _apart(here: Any, there: Any) -> str:
    if isinstance(here, dict) and isinstance(there, dict):
        names = [n for n in {**here, **there} if here.get(n) != there.get(n)]
        return ", ".join(f"{n}: {str(here.get(n))[:80]} | {str(there.get(n))[:80]}" for n in names)
    return f"{str(here)[:300]} | {str(there)[:300]}"


def _answer(hospital: Hospital, question: Question) -> Any:
    content = RecordDict({CONFIG: ConfigRecord({"hello": True})})
    if question.kind not in (HELLO, SURVEY):
        asked = {"round": 1, "phase": "train", "run_name": "pair", **question.instruction}
        content = RecordDict({CONFIG: ConfigRecord(dict(Instruction(**asked).to_config()))})
    if question.arrays is not None:
        content[ARRAYS] = to_record(dict(question.arrays))
    message = Message(content, 1001, question.kind, group_id="1")
    reply = app(message, hospital.context())
    if reply.has_error():
        return f"{reply.error.code} {reply.error.reason}"
    left = unbundle(reply.content)
    given: dict[str, Any] = {}
    for name, record in left.items():
        for key, value in record.items():
            array = getattr(value, "data", None)
            given[f"{name}/{key}"] = repr(value) if array is None else (value.shape, bytes(array))
    return given


@contextmanager
def _coupled(own: Silo, patient: Patient, seen: Seen, first: Seen | None) -> Iterator[None]:
    """Have a hospital hold ``own``, draw as the first one did and get the noise that it got."""
    with_noise = Release.with_noise
    batches: list[None] = []

    def same_noise(self: Release, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        number = len(seen.sums)
        seen.sums.append({name: total.cpu().clone() for name, total in sums.items()})
        seen.charged.append((self.bound, self.noise, self.releases))
        if first and number < len(first.sums):
            sums = first.sums[number]
        source = torch.Generator().manual_seed(number)
        return with_noise(replace_source(self, source), sums)

    def same_batch(count: int, rate: float, rng: Any) -> Tensor:
        batches.append(None)
        whole = count + (1 if first and patient.split == "train" else 0)
        drawn = torch.rand(whole, generator=torch.Generator().manual_seed(len(batches)))
        drawn = torch.where(torch.tensor(rate >= 1), 0.0, drawn)
        if whole > count:
            drawn = drawn[torch.arange(whole) != patient.place % whole]
        return torch.nonzero(drawn < rate).flatten()

    with (
        patch("fedsilo.client_app.opening.load_silo", lambda name, settings: own),
        patch("fedsilo.client_app.session.secret_seed", lambda folder: 5),
        patch("fedsilo.client_app.training.private.poisson_batch", same_batch),
        patch.object(Release, "with_noise", same_noise),
    ):
        yield


def replace_source(release: Release, source: torch.Generator) -> Release:
    """Return a release with noise of ``source``, and count one that is made."""
    if release.made >= release.releases:
        raise RuntimeError("more is released than was paid for")
    release.made += 1
    return Release(release.bound, release.noise, 1, source)
