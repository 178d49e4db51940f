import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsilo.core.errors import CheckpointError
from fedsilo.core.files.state_files import load_state, save_state
from tests.support.errors import refuses

Arrays = dict[str, npt.NDArray[Any]]

_ARRAYS = st.dictionaries(
    st.text("abc.01-", min_size=1, max_size=6),
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]),
        hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3),
    ),
    max_size=3,
)
_FACTS = st.dictionaries(
    st.text(max_size=4),
    st.one_of(st.integers(), st.booleans(), st.floats(allow_nan=False), st.text(max_size=4)),
    max_size=3,
)
STATE: Arrays = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "codes": np.array([7, 8])}
FACTS = {"round": 3, "method": "uefl"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_state_has_the_mode_that_was_asked_for(tmp_path: Path, mode: int) -> None:
    save_state(tmp_path / "state", STATE, FACTS, mode=mode)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == mode


@budget(max_examples=25, deadline=None)
@given(arrays=_ARRAYS, facts=_FACTS)
def test_a_state_comes_back_with_names_types_shapes_bytes_and_facts(
    folder: Path, arrays: Arrays, facts: dict[str, Any]
) -> None:
    save_state(folder / "state", arrays, facts)
    found, found_facts = load_state(folder / "state")
    assert found_facts == facts
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_a_single_number_comes_back_without_a_dimension(tmp_path: Path) -> None:
    save_state(tmp_path / "state", {"steps": np.array(5)}, {})
    assert load_state(tmp_path / "state")[0]["steps"].shape == ()


@pytest.fixture(scope="module")
def stored(folder: Path) -> bytes:
    save_state(folder / "whole", STATE, FACTS)
    return (folder / "whole").read_bytes()


@budget(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_state_cut_anywhere_is_refused_by_its_path(
    folder: Path, stored: bytes, data: st.DataObject
) -> None:
    path = folder / "cut"
    path.write_bytes(stored[: data.draw(st.integers(0, len(stored) - 1))])
    with pytest.raises(CheckpointError, match=str(path)):
        load_state(path)


@budget(max_examples=25, deadline=None)
@given(data=st.data(), flip=st.integers(1, 255))
def test_a_state_with_an_altered_number_is_refused_by_its_path(
    folder: Path, stored: bytes, data: st.DataObject, flip: int
) -> None:
    body = sum(array.nbytes for array in STATE.values())
    altered = bytearray(stored)
    altered[-data.draw(st.integers(1, body))] ^= flip
    path = folder / "altered"
    path.write_bytes(altered)
    with refuses(CheckpointError, path):
        load_state(path)


def test_a_state_with_a_bit_flipped_in_any_byte_is_refused(folder: Path, stored: bytes) -> None:
    path, let_through = folder / "flipped", {}
    for position in range(len(stored)):
        altered = bytearray(stored)
        altered[position] ^= 1 << position % 8
        path.write_bytes(altered)
        try:
            load_state(path)
            let_through[position] = "accepted"
        except CheckpointError:
            pass
        except Exception as error:
            let_through[position] = repr(error)
    assert let_through == {}


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 64, b"not a state"])
def test_a_file_that_is_no_state_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a state file"):
        load_state(tmp_path / "state")
