"""The second of two questions at ``trust: sums``: whether it is answered must tell nothing either.

A hospital refuses to open a round's sum twice with different parts. A server that asked for other
weights the second time made the parts the same unless one certain patient was there.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.client_app.privacy.unmasked_sums import RoundSum, UnmaskedSums
from fedsilo.core.errors import RefusedError
from fedsilo.server_app.config.settings import resolve
from tests.support.two_worlds import RUN, SITES, VICTIM, Federation, known_randomness, table

MLP = resolve(
    RUN | {"network.name": "mlp", "network.width": 4, "train.weight-decay": 0.0}
).as_mapping()


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Return three hospitals that have declared their data."""
    made = Federation(tmp_path / "home")
    with known_randomness(made.stream):
        for site in SITES:
            made.send(site, "query.hello", resolve(RUN).as_mapping())
    return made


def unit_beyond(plane: float) -> dict[str, Any]:
    """Return weights of an mlp with one unit that is exactly 0 for all ages below a plane."""
    weights: dict[str, Any] = {
        "encoder.layers.0.weight": np.array([[1e4, 0], [0, 0], [0, 0], [0, 0]]),
        "encoder.layers.0.bias": np.array([-1e4 * plane, 0, 0, 0]),
        "head.1.weight": np.array([[1.0, 0, 0, 0], [0, 0, 0, 0]]),
        "head.1.bias": np.zeros(2),
    }
    return {name: np.asarray(array, np.float32) for name, array in weights.items()}


def patients(age: int) -> str:
    """Return young patients, and one of another age."""
    lines = [f"{30 + i % 19},9,{i % 2}" for i in range(61)]
    return "\n".join(["age,dose,ill", lines[0], f"{age},10,1", *lines[2:], ""])


def test_a_round_asked_for_again_with_another_plane_tells_of_no_patient(
    federation: Federation, tmp_path: Path
) -> None:
    """One bit of one patient each time: it was answered unless the patient was beyond the plane."""
    seen = []
    for age in (69, 75):
        world = Federation(tmp_path / str(age))
        with known_randomness(world.stream):
            for site in SITES:
                world.send(site, "query.hello", resolve(RUN).as_mapping())
                world.patients(site, patients(age if site == VICTIM else 40))
            assert world.sum(MLP, unit_beyond(9.0)) is not None
            world.sum(MLP, unit_beyond(2.0))
        seen.append(world.seen)
    assert repr(seen[0]) == repr(seen[1])
    assert "was unmasked before for other weights" in seen[0][-1][2]


@pytest.mark.parametrize("changes", [{"evaluate": True}, {"expects_state": 1}, {"step": 1}])
def test_nor_with_other_words_around_the_same_weights(
    changes: dict[str, Any], federation: Federation
) -> None:
    config = resolve(RUN).as_mapping()
    weights = {"head.1.weight": np.zeros((2, 2), np.float32), "head.1.bias": np.zeros(2)}
    assert federation.sum(config, weights) is not None
    assert federation.sum(config, weights, **changes) is None
    assert "was unmasked before for other weights" in federation.seen[-1][2]


def test_a_failure_is_not_seen_where_the_whole_network_stays(tmp_path: Path) -> None:
    """A site that failed sent a masked 0, and one that did not fail sent no arrays at all."""
    config = resolve(RUN | {"method": "fedper", "fedper.personal-layers": 9}).as_mapping()
    start = {"start/head.1.weight": np.zeros((2, 2), np.float32)}
    seen = []
    for name, text in (("with", table()), ("without", None)):
        world = Federation(tmp_path / name)
        with known_randomness(world.stream):
            for site in SITES:
                world.send(site, "query.hello", config)
            world.patients(VICTIM, text)
            left = world.sum(config, start)
        assert left is not None
        assert left["secure/counts"][1] == int(text is None)
        seen.append(world.seen)
    assert repr(seen[0]) == repr(seen[1])


def test_nor_by_another_state_of_the_round_before(federation: Federation) -> None:
    """A round's part is made of the state that the round before has left at the site."""
    config = resolve(RUN).as_mapping()
    weights = {"head.1.weight": np.zeros((2, 2), np.float32), "head.1.bias": np.zeros(2)}
    assert federation.sum(config, weights, round=2) is not None
    assert federation.sum(config, {name: array + 1 for name, array in weights.items()}) is None
    assert "or a later one's, was unmasked before" in federation.seen[-1][2]


def test_the_same_question_is_answered_again(federation: Federation) -> None:
    """A server that lost a round asks for it again."""
    config = resolve(RUN).as_mapping()
    weights = {"head.1.weight": np.zeros((2, 2), np.float32), "head.1.bias": np.zeros(2)}
    first, again = (federation.sum(config, weights) for _ in range(2))
    assert first is not None
    assert again is not None
    assert (first["head.1.weight"] == again["head.1.weight"]).all()


def test_a_record_of_an_older_version_still_counts(tmp_path: Path) -> None:
    (tmp_path / "secure-sums.json").write_text('{"3": [["a", "b", "c"], "77"]}')
    sums = UnmaskedSums(tmp_path, 3)
    sums.refuse_other_question("any")  # it does not know of which question its sum was
    with pytest.raises(RefusedError):
        sums.refuse_other("78")
    sums.note(RoundSum(["a", "b", "c"], "77", "one"))
    with pytest.raises(RefusedError):
        sums.refuse_other_question("another")
