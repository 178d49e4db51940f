"""The curves of the watch page, and the state in words."""

import shutil
from pathlib import Path

from fedsilo.reports.watch.curves import run_curves
from fedsilo.reports.watch.serve import watch_page
from fedsilo.reports.watch.view import look_at_run
from fedsilo.reports.watch.watched import look_at
from tests.fedsilo.reports.watch.test_watched import written

_TRAFFIC = """round,phase,site,bytes_down,bytes_up,seconds,steps,samples
1,hello,north,10,10,0.0,0,0
1,train,north,1000000,500000,1.0,2,8
1,train,south,1000000,500000,3.0,2,8
2,train,north,1000000,500000,2.0,2,8
"""
_METRICS = """round,site,split,metric,value
0,north,test,accuracy,0.4
0,south,test,accuracy,0.6
1,north,test,accuracy,0.7
1,south,test,accuracy,0.8
"""


def test_run_curves_are_means_over_hospitals_and_sums_over_a_round(tmp_path: Path) -> None:
    (tmp_path / "traffic.csv").write_text(_TRAFFIC)
    (tmp_path / "metrics.csv").write_text(_METRICS)
    accuracy, bytes_, slow = run_curves(tmp_path)
    assert accuracy.alt.endswith("Now: test 0.75.")
    assert bytes_.alt.endswith("Now: to the hospitals 1; from them 0.5.")
    assert slow.alt.endswith("south 3.00; north 1.50.")


def test_run_curves_before_the_first_round_or_within_a_write_are_none(tmp_path: Path) -> None:
    assert run_curves(tmp_path) == []
    (tmp_path / "traffic.csv").write_text(_TRAFFIC)
    (tmp_path / "metrics.csv").write_text(_METRICS + "1,north,te")
    assert run_curves(tmp_path) == []


def test_state_in_words_names_whom_the_run_waits_for(tmp_path: Path) -> None:
    assert look_at(written(tmp_path / "trial")).in_words() == (
        "The run is in round 2 of 3; 1 of 3 hospitals have answered; it waits for east, south; of "
        "these south is not connected; about 1:05 are left."
    )
    finished = written(tmp_path / "over", state="finished", finished_rounds=3)
    assert look_at(finished).in_words() == "The run is finished after 3 rounds."
    gone = look_at(written(tmp_path / "gone", process_started=1.0)).in_words()
    assert gone.startswith("The run is over: its process was killed")


def test_watch_page_of_a_run_has_its_curves(hearts: Path, tmp_path: Path) -> None:
    run = shutil.copytree(hearts / "fedavg-seed0", tmp_path / "run")
    html = watch_page(look_at_run(run))
    assert html.count("<svg") == 4
    assert "The slowest first" in html
