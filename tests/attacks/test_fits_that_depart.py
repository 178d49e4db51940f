"""A server that departs from Newton's method in a fit at 'sums' gets no answer from a hospital.

Without the check, seven answers read a patient's row: ``test_regressions.py``. The hospitals' app
is the unaltered one, and the server is the attacker's.
"""

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from fedsilo.core.messages import SECURE_AGREE, SECURE_KEYS, SECURE_SHARES, SECURE_UNMASK
from fedsilo.models.maths.glm_steps import FitProgress, first_progress
from fedsilo.models.methods.glm import BETA, SUMS, UNCLIPPED, ScaleNotes, grid_over
from fedsilo.models.privacy.secure_sum import mask_arrays
from fedsilo.server_app.config.settings import resolve
from tests.support.fit_server import FIT, MODEL, FitServer
from tests.support.two_worlds import (
    SITES,
    VICTIM,
    Federation,
    known_randomness,
    table,
)

LAST = 3  # rounds that are answered before the attack: two of moments, one of Newton's
NUMBERS = (*SUMS, UNCLIPPED)


def federation_in(home: Path) -> Federation:
    """Return hospitals that have declared their data, and do not count messages."""
    made = Federation(home, limits={"max-repeats": 1000, "max-messages": 1000})
    for site in SITES:
        made.send(site, "query.hello", resolve(FIT).as_mapping())
    return made


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> FitServer:
    """Return a fit after ``LAST`` honest rounds."""
    server = FitServer(federation_in(tmp_path_factory.mktemp("fit") / "home"))
    for _ in range(LAST):
        server.step()
    return server


@pytest.fixture(scope="module")
def keyed(honest: FitServer, tmp_path_factory: pytest.TempPathFactory) -> FitServer:
    """Return the same fit, whose hospitals have shared the keys of the next round."""
    server = copied(honest, tmp_path_factory.mktemp("keyed") / "home")
    asked = {"round": LAST + 1, "run_name": "r", "evaluate": False}
    for phase in (SECURE_KEYS, SECURE_SHARES):
        server.federation.secure(phase, resolve(FIT).as_mapping(), **asked)
    return server


def copied(server: FitServer, home: Path) -> FitServer:
    """Return the same server and hospitals, with files of their own."""
    shutil.copytree(server.federation.home, home)
    other = copy.deepcopy(server)
    other.federation.home = home
    return other


def asked(
    server: FitServer,
    progress: FitProgress | None = None,
    proof: dict[str, list[str]] | None = None,
    settings: dict[str, Any] = FIT,
    kind: str = "train",
    numbers: dict[str, Any] | None = None,
    grid: float = 0.0,
    **instruction: Any,
) -> str:
    """Ask only the victim in the next round; return why it refuses, '' if it would answer."""
    progress = progress or server.progress
    common, federation = resolve(settings).common, server.federation
    notes = ScaleNotes(not progress.beta, progress.scale, grid or grid_over(common, len(SITES)))
    secure = {"round": LAST + 1, "sites": list(SITES), "metrics": [], "arrays": sorted(NUMBERS)}
    secure |= server.proofs[-1] if proof is None else proof
    answer = federation.send(
        VICTIM,
        kind,
        resolve(settings).as_mapping(),
        server.arrays(progress) | (numbers or {}),
        secure,
        **{"round": LAST + 1, "evaluate": False, "notes": notes.to_values(), **instruction},
    )
    return "" if answer is not None else federation.last_error


def own_beta(server: FitServer) -> FitProgress:
    """Return one of the seven questions of ``test_regressions.py``."""
    return server.changed(beta=[0.0, 0.0, 0.3])


def moved(server: FitServer) -> FitProgress:
    """Return coefficients that differ in the ninth digit."""
    return server.changed(beta=[one * (1 + 1e-9) for one in server.progress.beta])


QUESTIONS: dict[str, Callable[[FitServer], dict[str, Any]]] = {
    "own coefficients": lambda server: {"progress": own_beta(server)},
    "moved coefficients": lambda server: {"progress": moved(server)},
    "no number": lambda server: {"progress": server.changed(beta=[0.0, float("nan"), 0.0])},
    "other units": lambda server: {"progress": server.changed(deviations=[1.0, 2.0, 2.0])},
    "another scale": lambda server: {"progress": server.changed(scale=server.progress.scale * 2)},
    "another grid": lambda server: {"grid": 2.0**-5},
    "moments again": lambda server: {"progress": first_progress(MODEL)},
    "shifted sums": lambda server: {"numbers": {SUMS[0]: np.ones(12, np.float32)}},
    "another array": lambda server: {"numbers": {"more": np.ones(2, np.float32)}},
    "coarse coefficients": lambda server: {"numbers": {BETA: np.zeros(3, np.float16)}},
    "another phase": lambda server: {"phase": "own-fit"},
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_hospital_answers_no_question_that_it_has_not_computed(
    question: str, keyed: FitServer
) -> None:
    fault = asked(keyed, **QUESTIONS[question](keyed))
    assert "round 4" in fault, "it is refused before the data are opened, so with the reason"


def flipped(text: str) -> str:
    """Return hexadecimal digits of which the first is another."""
    return ("1" if text[0] == "0" else "0") + text[1:]


def altered(proof: dict[str, list[str]], key: str, place: int) -> dict[str, list[str]]:
    texts = list(proof[key])
    texts[place] = flipped(texts[place])
    return {**proof, key: texts}


def without(proof: dict[str, list[str]], site: str) -> dict[str, list[str]]:
    place = proof["proof-sites"].index(site)
    shorter = dict(proof)
    for key in ("proof-sites", "proof-parts", "proof-own-masks"):
        shorter[key] = [text for at, text in enumerate(proof[key]) if at != place]
    return shorter


def swapped(proof: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return a proof with the parts and own masks of two sites exchanged: the same sum."""
    turned = {
        key: [proof[key][at] for at in (1, 0, 2)] for key in ("proof-parts", "proof-own-masks")
    }
    return {**proof, **turned}


PROOFS: dict[str, Callable[[FitServer], dict[str, list[str]]]] = {
    "none": lambda server: {},
    "of the victim's part": lambda server: altered(server.proofs[-1], "proof-parts", 0),
    "of another part": lambda server: altered(server.proofs[-1], "proof-parts", 2),
    "of an own mask": lambda server: altered(server.proofs[-1], "proof-own-masks", 1),
    "of the round before": lambda server: server.proofs[-2],
    "without a site": lambda server: without(server.proofs[-1], "west"),
    "of sites exchanged": lambda server: swapped(server.proofs[-1]),
    "cut short": lambda server: {**server.proofs[-1], "proof-lengths": ["1"]},
    "no digits": lambda server: {**server.proofs[-1], "proof-own-masks": ["xy"] * 3},
}


@pytest.mark.parametrize("proof", PROOFS)
def test_a_hospital_takes_no_sum_that_the_hospitals_have_not_signed(
    proof: str, keyed: FitServer
) -> None:
    assert "round 4" in asked(keyed, proof=PROOFS[proof](keyed))


def test_a_run_that_begins_in_its_middle_is_refused(keyed: FitServer, tmp_path: Path) -> None:
    """A hospital has signed nothing in that run, so another run's proof proves nothing."""
    keyed = copied(keyed, tmp_path / "home")
    for phase in (SECURE_KEYS, SECURE_SHARES):
        keyed.federation.secure(phase, resolve(FIT).as_mapping(), round=LAST + 1, run_name="s")
    assert "round 4" in asked(keyed, run_name="s")


def test_other_columns_at_the_same_coefficients_are_refused(
    honest: FitServer, tmp_path: Path
) -> None:
    server = copied(honest, tmp_path / "home")
    server.settings = FIT | {"glm.columns": "dose,age"}
    assert server.ask() is None
    assert "settings" in server.federation.last_error


def test_a_network_is_not_measured_in_a_fit(keyed: FitServer) -> None:
    assert "round 4" in asked(keyed, kind="evaluate", phase="evaluate")


def test_a_lost_answer_is_given_again_and_the_fit_goes_on(
    honest: FitServer, tmp_path: Path
) -> None:
    server = copied(honest, tmp_path / "home")
    lost, step = server.ask(), server.step()
    assert lost is not None
    np.testing.assert_array_equal(lost[SUMS[0]], step[SUMS[0]])
    # A server on another machine may solve the same equations with another last digit
    server.progress = server.changed(beta=[one * (1 + 4e-15) for one in server.progress.beta])
    assert server.ask() is not None


def answered(server: FitServer) -> Federation:
    """Let all hospitals answer the next round, up to their masked parts."""
    federation, config = server.federation, resolve(FIT).as_mapping()
    common = resolve(FIT).common
    notes = ScaleNotes(False, server.progress.scale, grid_over(common, len(SITES))).to_values()
    secure = {"round": LAST + 1, "sites": list(SITES), "metrics": [], "arrays": sorted(NUMBERS)}
    asked = {"round": LAST + 1, "evaluate": False, "notes": notes}
    for site in SITES:
        arrays = server.arrays(server.progress)
        answer = federation.send(site, "train", config, arrays, secure | server.proofs[-1], **asked)
        assert answer is not None, federation.last_error
        federation.parts[site] = {n: a.numpy() for n, a in answer["arrays"].items()}
    return federation


def test_a_hospital_signs_no_other_part_under_its_name(keyed: FitServer, tmp_path: Path) -> None:
    federation = answered(copied(keyed, tmp_path / "home"))
    federation.parts[VICTIM][SUMS[0]] += np.uint32(1)
    federation.secure(SECURE_AGREE, resolve(FIT).as_mapping(), round=LAST + 1)
    assert VICTIM not in federation.signatures


@pytest.mark.parametrize("forged", [None, "victim's"])
def test_a_part_that_its_hospital_has_not_signed_is_not_unmasked(
    forged: Any, keyed: FitServer, tmp_path: Path
) -> None:
    """The server shows all others another part of one hospital, which does not sign it."""
    federation, config = answered(copied(keyed, tmp_path / "home")), resolve(FIT).as_mapping()
    federation.parts["west"][SUMS[0]] += np.uint32(1)
    federation.secure(SECURE_AGREE, config, round=LAST + 1)
    assert sorted(federation.signatures) == [VICTIM, "south"]
    if forged is not None:
        mine = federation.signatures[VICTIM]["signature"]
        federation.signatures["west"] = {"signature": mine if forged == "victim's" else forged}
    federation.secure(SECURE_UNMASK, config, round=LAST + 1)
    assert "signed" in federation.last_error


def test_hospitals_that_change_between_rounds_are_refused(tmp_path: Path) -> None:
    """The sums of two rounds over other hospitals would differ by one hospital's part."""
    sites = tuple(sorted((*SITES, "east")))
    federation = Federation(tmp_path / "home", sites)
    config = resolve(FIT).as_mapping()
    for site in sites:
        federation.send(site, "query.hello", config)
    server = FitServer(federation, sites=sites)
    server.step()
    federation.sites = SITES
    server.sites = SITES
    assert server.ask() is None
    assert "east" in federation.last_error


def test_a_fit_ends_after_a_round_that_a_hospital_could_not_answer(
    honest: FitServer, tmp_path: Path
) -> None:
    """That hospital adds a masked 0, as it does if its sums would rest on few patients."""
    server = copied(honest, tmp_path / "home")
    federation = server.federation
    federation.patients(VICTIM, None)
    assert server.step()["secure/counts"][1] == 1
    assert "error" not in {kind for kind, *_ in federation.seen}
    assert server.ask() is None
    assert "could not answer" in federation.last_error


@dataclass
class World:
    """The messages that left the victim in a fit, and its parts before and after masking."""

    seen: list[Any]
    bare: list[dict[str, Any]]
    masked: list[dict[str, Any]]


def world(patients: str, home: Path) -> World:
    """Play two rounds of a fit in which the victim has declared one table and holds another."""
    bare: list[dict[str, Any]] = []
    masked: list[dict[str, Any]] = []

    def spy(arrays: dict[str, Any], *keys: Any) -> dict[str, Any]:
        bare.append({name: array.copy() for name, array in arrays.items()})
        masked.append(mask_arrays(arrays, *keys))
        return masked[-1]

    federation = Federation(home, sites=SITES)
    place = "fedsilo.client_app.privacy.secure_aggregation.mask_arrays"
    with known_randomness(federation.stream), patch(place, spy):
        for site in SITES:
            federation.send(site, "query.hello", resolve(FIT).as_mapping())
        federation.patients(VICTIM, patients)
        server = FitServer(federation)
        for _ in range(2):
            server.step()
    of_victim = slice(SITES.index(VICTIM), None, len(SITES))
    return World(federation.seen, bare[of_victim], masked[of_victim])


def test_the_masks_hide_a_hospital_s_part_of_a_fit(tmp_path: Path) -> None:
    """Other patients change the masked numbers, and else only the signature over these."""
    one = world(table(), tmp_path / "one")
    other = world(table().replace("\n30,8,0\n", "\n69,2,1\n", 1), tmp_path / "other")
    for (size, said), (also_size, also_said) in zip(one.seen, other.seen, strict=True):
        if set(said.get("secure", ())) == {"round", "signature"}:
            continue
        assert (size, repr(said)) == (also_size, repr(also_said))
    for name in one.bare[0]:
        assert (one.bare[0][name] != one.masked[0][name]).any()
        # The masks are the same in both worlds, so they do not depend on patients
        change = one.bare[0][name] - other.bare[0][name]
        np.testing.assert_array_equal(one.masked[0][name] - other.masked[0][name], change)
    assert any((one.bare[0][name] != other.bare[0][name]).any() for name in SUMS)


def test_a_hospital_without_its_own_record_of_the_fit_refuses_until_it_is_back(
    keyed: FitServer, tmp_path: Path
) -> None:
    server = copied(keyed, tmp_path / "home")
    (record,) = [
        path for path in server.federation.home.rglob("fit-path.json") if VICTIM in path.parts
    ]
    kept = record.read_bytes()
    record.write_bytes(kept[:-9])
    assert "fit-path.json" in asked(server)
    record.write_bytes(kept)
    assert asked(server) == ""
