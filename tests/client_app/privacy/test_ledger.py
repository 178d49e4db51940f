import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.core.errors import CheckpointError, EpsilonSpentError
from fedsilo.models.privacy.accountant import epsilon

STEP = (2.0, 1.0)
ONE, TWO = (epsilon({STEP: count}, 1e-5) for count in (1, 2))


def of_run(tmp_path: Path, hospital: Ledger | None = None, cap: float = 0.0) -> Ledger:
    return Ledger(tmp_path / "run" / LEDGER, cap, 1e-5, hospital)


def own(tmp_path: Path, cap: float) -> Ledger:
    return Ledger(tmp_path / "own" / LEDGER, cap, 1e-5, of_all_runs=True)


def test_spending_is_written_and_added_up(tmp_path: Path) -> None:
    spending = of_run(tmp_path)
    spending.spend({STEP: 3, (2.0, 0.5): 1})
    spending.spend({STEP: 1})
    assert spending.releases() == {STEP: 4, (2.0, 0.5): 1}
    written = json.loads((tmp_path / "run" / LEDGER).read_text())
    assert written == {"releases": [[2.0, 0.5, 1], [2.0, 1.0, 4]]}
    assert stat.S_IMODE((tmp_path / "run" / LEDGER).stat().st_mode) == 0o600


def test_epsilon_is_that_of_an_accountant_run_by_hand(tmp_path: Path) -> None:
    spending = of_run(tmp_path)
    spending.spend({(1.5, 0.2): 40})
    spending.spend({(3.0, 1.0): 2})
    by_hand = RdpAccountant()
    by_hand.compose(PoissonSampledDpEvent(0.2, GaussianDpEvent(1.5)), 40)
    by_hand.compose(GaussianDpEvent(3.0), 2)
    assert spending.epsilon() == pytest.approx(by_hand.get_epsilon(1e-5), rel=0.02)


def test_what_would_exceed_the_runs_cap_is_refused_and_not_entered(tmp_path: Path) -> None:
    spending = of_run(tmp_path, cap=(ONE + TWO) / 2)
    spending.spend({STEP: 1})
    said = f"epsilon is spent: this run has spent {ONE:.4g} at delta 1e-05, .* make it {TWO:.4g}"
    with pytest.raises(EpsilonSpentError, match=said):
        spending.spend({STEP: 1})
    assert spending.releases() == {STEP: 1}


def test_exactly_the_cap_may_be_spent(tmp_path: Path) -> None:
    spending = of_run(tmp_path, cap=ONE)
    spending.spend({STEP: 1})
    assert spending.releases() == {STEP: 1}


def test_the_hospitals_cap_holds_over_runs_of_any_name(tmp_path: Path) -> None:
    cap = own(tmp_path, (ONE + TWO) / 2)
    of_run(tmp_path / "first", cap).spend({STEP: 1})
    with pytest.raises(EpsilonSpentError, match=r"all runs have spent .* the hospital's own"):
        of_run(tmp_path / "second", cap).spend({STEP: 1})
    assert cap.releases() == {STEP: 1}
    assert not (tmp_path / "second" / "run" / LEDGER).exists()


def test_what_belongs_to_no_run_counts_against_the_hospitals_cap(tmp_path: Path) -> None:
    cap = own(tmp_path, (ONE + TWO) / 2)
    cap.spend({STEP: 1})
    with pytest.raises(EpsilonSpentError):
        of_run(tmp_path, cap).spend({STEP: 1})


def test_messages_side_by_side_are_all_counted(tmp_path: Path) -> None:
    cap = own(tmp_path, 1e6)
    ledgers = [of_run(tmp_path / str(number), cap) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: one.spend({STEP: 1}), ledgers))
    assert cap.releases() == {STEP: 8}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "{}", '{"releases": 3}', '{"releases": [[2.0, 1.0]]}'),
        '{"releases": [[0.0, 1.0, 1]]}',
        '{"releases": [[2.0, 1.5, 1]]}',
        '{"releases": [[2.0, 1.0, -1]]}',
        '{"releases": [[2.0, 1.0, true]]}',
        '{"releases": {"2.0": 1}}',
    ],
)
def test_a_damaged_ledger_stops_the_site(tmp_path: Path, content: str) -> None:
    spending = of_run(tmp_path)
    spending.path.parent.mkdir(parents=True)
    spending.path.write_text(content)
    with pytest.raises(CheckpointError, match=r"is damaged .*bring it back, or choose another"):
        spending.spend({STEP: 1})
    assert spending.path.read_text() == content
