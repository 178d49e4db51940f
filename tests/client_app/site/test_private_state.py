import errno
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedsilo.client_app.site.private_state import SiteState, settings_digest_of
from fedsilo.core.errors import CheckpointError, SiteError
from fedsilo.core.messages import Instruction, state_key
from fedsilo.core.methods import METHODS
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory


@pytest.fixture
def state(tmp_path: Path) -> SiteState:
    return SiteState(tmp_path / "s2a")


def at(round_: int, step: int = 0) -> Instruction:
    return Instruction(round_, "train", step)


def put(state: SiteState, round_: int, step: int = 0) -> None:
    state.store(at(round_, step), {"w": torch.tensor([float(round_), float(step)])})


def got(state: SiteState, round_: int, step: int = 0) -> tuple[float, float] | None:
    found = state.load_before(at(round_, step))
    return None if found is None else (float(found["w"][0]), float(found["w"][1]))


def test_a_new_site_has_no_state(state: SiteState) -> None:
    assert got(state, 1) is None
    assert not state.folder.exists()


def test_a_state_that_the_server_expects_and_is_not_there_is_an_error(state: SiteState) -> None:
    expected = Instruction(2, "train", expects_state=True)
    with pytest.raises(CheckpointError, match=r"site s2a is gone from .*new run"):
        state.load_before(expected)
    put(state, 1)
    found = state.load_before(expected)
    assert found is not None
    assert found["w"].tolist() == [1, 0]


@pytest.mark.parametrize(("told", "refused"), [((1, 2), False), ((2, 0), True), ((3, 1), True)])
def test_state_older_than_the_newest_that_the_server_knows_of_is_refused(
    state: SiteState, told: tuple[int, int], refused: bool
) -> None:
    put(state, 1, 0)
    put(state, 1, 2)
    asked = Instruction(4, "train", expects_state=state_key(*told))
    if refused:
        said = rf"^private state of site s2a, round 4: the site kept one from round {told[0]}, but "
        with pytest.raises(CheckpointError, match=f"{said}.* from round 1: bring .*new run$"):
            state.load_before(asked)
    else:
        assert state.load_before(asked) is not None


def test_a_resumed_run_ends_in_a_line_where_a_site_has_lost_its_newest_state(
    inline_run: Callable[..., RunDirectory], tiny: Callable[..., dict[str, Value]]
) -> None:
    values = tiny("local", rounds=2)
    run = inline_run(values)
    states = sorted((run.path / "sites" / "s2a").glob("*.safetensors"))
    newest = states[-1].read_bytes()
    (run.path / "summary.json").unlink()
    states[-1].unlink()
    with pytest.raises(SiteError) as refused:
        inline_run(values | {"resume": True})
    said = str(refused.value)
    assert "site s2a, round 3: the site kept one from round 2, but the newest in" in said
    assert "is from round 1: bring the newer one back, or start a new run" in said
    assert "\n" not in said
    states[-1].write_bytes(newest)
    assert (inline_run(values | {"resume": True}).path / "summary.json").is_file()


def test_a_state_is_readable_by_its_owner_alone(state: SiteState) -> None:
    put(state, 1)
    (path,) = state.folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_is_named_and_what_was_stored_stays(
    state: SiteState, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(state, 1)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    said = r"private state of site s2a cannot be written to .*: No space left on device; make room"
    with pytest.raises(CheckpointError, match=said):
        put(state, 2)
    assert [path.name for path in state.folder.iterdir()] == ["round-000001-00.safetensors"]
    assert got(state, 2) == (1, 0)


def test_what_a_killed_attempt_left_half_written_goes_with_the_next_state(state: SiteState) -> None:
    put(state, 1)
    (state.folder / ".round-000002-00.safetensors.part").write_bytes(b"half")
    put(state, 2)
    left = sorted(path.name for path in state.folder.iterdir())
    assert left == ["round-000001-00.safetensors", "round-000002-00.safetensors"]


def test_a_state_comes_back_bit_for_bit(state: SiteState) -> None:
    weights = {"a.b": torch.randn(3, 4).T, "c": torch.zeros(0, 2)}
    state.store(at(1), weights)
    found = state.load_before(at(2))
    assert found is not None
    assert set(found) == {"a.b", "c"}
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor)


def test_the_newest_state_older_than_the_instruction_is_taken(state: SiteState) -> None:
    for key in ((1, 0), (1, 2), (2, 0)):
        put(state, *key)
    assert got(state, 1, 0) is None
    assert got(state, 1, 1) == (1, 0)
    assert got(state, 1, 2) == (1, 0)
    assert got(state, 2, 0) == (1, 2)
    assert got(state, 3, 0) == (2, 0)


def test_a_state_of_a_round_of_more_than_a_hundred_steps_is_found(state: SiteState) -> None:
    put(state, 1, 104)  # of 'cyclic', which asks one site after the other
    assert got(state, 2) == (1, 104)


def test_a_state_of_a_round_that_the_server_lost_is_not_taken(state: SiteState) -> None:
    for round_ in (1, 2, 3):
        put(state, round_)
    assert got(state, 3) == (2, 0)
    state.store(at(3), {"w": torch.tensor([3.0, 9.0])})
    assert got(state, 4) == (3, 9)


def test_a_step_that_only_the_lost_round_had_is_forgotten_when_it_is_done_again(
    state: SiteState,
) -> None:
    put(state, 1)
    put(state, 2, 0)
    put(state, 2, 2)
    put(state, 3, 0)
    state.store(at(2, 0), {"w": torch.tensor([2.0, 7.0])})
    assert got(state, 3) == (2, 7)


def test_a_state_that_was_dropped_by_now_is_an_error_and_not_a_fresh_start(
    state: SiteState,
) -> None:
    for round_ in (1, 2, 3, 4):
        put(state, round_)
    asked = Instruction(3, "train", expects_state=state_key(2, 0))
    with pytest.raises(CheckpointError, match=r"site s2a: round 3 is .* oldest .* from round 3"):
        state.load_before(asked)
    assert got(state, 4) == (3, 0)


def test_a_server_that_went_back_to_before_a_sites_first_state_has_it_start_anew(
    state: SiteState,
) -> None:
    put(state, 5)  # its first: the site was away in earlier rounds
    assert got(state, 4) is None


def test_a_site_that_is_asked_for_the_first_round_again_starts_anew(state: SiteState) -> None:
    for round_ in (1, 2, 3, 4):
        put(state, round_)
    assert got(state, 1) is None
    put(state, 1)
    assert [path.name for path in state.folder.iterdir()] == ["round-000001-00.safetensors"]


def test_only_the_newest_two_rounds_are_kept_with_all_their_steps(state: SiteState) -> None:
    for key in ((1, 0), (1, 2), (2, 0), (2, 2), (3, 0)):
        put(state, *key)
    assert sorted(path.name for path in state.folder.iterdir()) == [
        "round-000002-00.safetensors",
        "round-000002-02.safetensors",
        "round-000003-00.safetensors",
    ]


def test_rounds_that_a_site_missed_do_not_cost_it_its_states(state: SiteState) -> None:
    put(state, 2)
    put(state, 9)
    assert got(state, 9) == (2, 0)
    assert got(state, 20) == (9, 0)


def test_other_files_in_the_folder_are_left_alone(state: SiteState) -> None:
    state.folder.mkdir()
    other = state.folder / "round-notes.txt"
    other.write_text("mine")
    for round_ in (1, 2, 3, 4):
        put(state, round_)
    assert other.read_text() == "mine"
    assert got(state, 5) == (4, 0)


@pytest.mark.parametrize("keep", [0, 7, 60, -1])
def test_a_state_cut_short_is_refused_and_the_error_names_the_site(
    state: SiteState, keep: int
) -> None:
    put(state, 1)
    path = state.folder / "round-000001-00.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"private state of site s2a: .*remove the file"):
        state.load_before(at(2))


def test_an_altered_state_is_refused(state: SiteState) -> None:
    put(state, 1)
    path = state.folder / "round-000001-00.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"site s2a: .*checksum"):
        state.load_before(at(2))


def test_a_sites_first_state_may_be_done_again_in_a_later_round(tmp_path: Path) -> None:
    state = SiteState(tmp_path / "s1a")
    again = Instruction(round=3, phase="train")
    state.store(again, {"w": torch.ones(1)})
    assert state.load_before(again) is None


def test_a_state_is_not_opened_under_other_settings(state: SiteState) -> None:
    kept = SiteState(state.folder, "nothing is shared")
    put(kept, 1)
    assert got(kept, 2) == (1, 0)
    with pytest.raises(CheckpointError, match=r"s2a in .* was kept under other settings"):
        got(SiteState(state.folder, "all is shared"), 2)
    assert got(kept, 2) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"fedevprompt.shared-prompts": "all"}, False),
        ({"fedevprompt.buffer-maps": 3}, False),
        ({"seed": 8}, False),
        ({"train.batch-size": 8}, False),
        ({"rounds": 9, "machine.device": "auto", "machine.threads": 2}, True),
        ({"run.out": "elsewhere", "run.name": "x", "data.dir": "d", "data.cache-dir": "c"}, True),
    ],
)
def test_settings_digest_is_of_all_settings_that_a_hospital_does_not_change(
    changes: dict[str, Value], same: bool, tiny: Callable[..., dict[str, Value]]
) -> None:
    first = resolve(tiny("fedevprompt"))
    other = resolve(tiny("fedevprompt") | changes)
    digests = [settings_digest_of(settings.common, settings.own) for settings in (first, other)]
    assert (digests[0] == digests[1]) is same


def test_no_method_has_the_settings_digest_of_another(
    tiny: Callable[..., dict[str, Value]],
) -> None:
    settings = [resolve(tiny(method)) for method in sorted(METHODS)]
    assert len({settings_digest_of(one.common, one.own) for one in settings}) == len(METHODS)


def test_no_two_phases_have_one_key() -> None:
    assert state_key(3, 0) < state_key(3, 100) < state_key(3, 999) < state_key(4, 0)
