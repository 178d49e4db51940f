from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import Instruction, Notes
from fedsilo.models.methods.decentralised import MixingNotes
from fedsilo.models.methods.mix import PoolNotes
from fedsilo.models.methods.picsr import StageNotes


@given(st.dictionaries(st.text(), st.floats(0, 1)))
def test_mixing_weights_come_as_they_were_sent(row: dict[str, float]) -> None:
    sent = Instruction(1, "train", run_name="run", notes=MixingNotes(row).to_values()).to_config()
    notes = MixingNotes.from_values(Instruction.from_config(sent).notes)
    assert notes.mixing == row


def test_a_list_travels_as_json_and_a_text_as_it_is() -> None:
    assert PoolNotes(("a", "b\nc")).to_values() == {"sites": '["a", "b\\nc"]'}
    assert list(PoolNotes.from_values({"sites": '["a"]'}).sites) == ["a"]
    assert StageNotes("router").to_values() == {"stage": "router"}
    assert Notes().to_values() == {}


@dataclass(frozen=True, slots=True)
class SlottedNotes(Notes):
    names: tuple[str, ...]
    stage: int = 0


def test_notes_of_a_plug_may_have_slots() -> None:
    assert SlottedNotes(("a",), 2).to_values() == {"names": '["a"]', "stage": 2}


def test_what_may_be_missing_has_its_default() -> None:
    assert MixingNotes.from_values({"stage": "x"}).mixing == {}


@pytest.mark.parametrize("values", [{}, {"sites": "["}, {"sites": "s1a\ns2a"}])
def test_notes_of_another_version_are_a_sites_error(values: dict[str, str]) -> None:
    with pytest.raises(SiteError, match="different versions of fedsilo"):
        PoolNotes.from_values(values)
