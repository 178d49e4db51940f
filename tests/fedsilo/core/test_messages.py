import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import Instruction, measurement, measurements
from fedsilo.core.site_facts import SiteFacts


@budget(max_examples=25, deadline=None)
@given(
    st.builds(
        Instruction,
        round=st.integers(1, 10**6),
        phase=st.text(max_size=8),
        step=st.integers(0, 99),
        run_name=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._+-]{,127}", fullmatch=True),
        run_dir=st.text(max_size=8),
        evaluate=st.booleans(),
        expects_state=st.integers(0, 10**8),
        returns=st.booleans(),
        notes=st.dictionaries(
            st.text(max_size=4), st.booleans() | st.integers() | st.text(max_size=4), max_size=3
        ),
    )
)
def test_an_instruction_arrives_as_it_was_sent(instruction: Instruction) -> None:
    assert Instruction.from_config(instruction.to_config()) == instruction


@pytest.mark.parametrize("key", Instruction(round=1, phase="train").to_config())
def test_a_message_without_a_key_of_the_contract_is_refused_by_the_key(key: str) -> None:
    config = Instruction(round=1, phase="train", run_name="run").to_config()
    del config[key]
    with pytest.raises(SiteError, match=f"lacks '{key}'.*different versions"):
        Instruction.from_config(config)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../up", "a/b", "/etc", ".hidden", "a/", "a\n", "a\0", "\x1b", "é", 129 * "n"],
)
def test_a_run_name_that_could_leave_its_folder_or_mislead_is_refused(name: str) -> None:
    config = Instruction(round=1, phase="train", run_name=name).to_config()
    with pytest.raises(SiteError, match=r"must be a plain name of at most 128"):
        Instruction.from_config(config)


def test_notes_keep_their_names_whatever_an_instruction_has_of_its_own() -> None:
    notes = {"round": 7, "note.x": "y", "": True}
    config = Instruction(round=1, phase="train", run_name="run", notes=notes).to_config()
    assert (config["round"], config["note.round"]) == (1, 7)
    assert Instruction.from_config(config).notes == notes


def test_measurements_are_read_back_sorted_and_other_metrics_are_left_out() -> None:
    metrics: dict[str, object] = {
        measurement("trained", "train", "loss"): 0.5,
        measurement("incoming", "test", "accuracy"): 1,
        "num-examples": 30,
        "seconds": 1.5,
    }
    assert list(measurements(metrics)) == [
        ("incoming", "test", "accuracy", 1.0),
        ("trained", "train", "loss", 0.5),
    ]


def test_site_facts_count_the_samples_of_each_split() -> None:
    facts = SiteFacts("s1a", "D1", (1, 16, 16), 3, {"train": [4, 5, 0], "test": [1, 0, 2]}, {})
    assert facts.sizes == {"train": 9, "test": 3}
