"""The example that draws a metric over a setting, on three run directories."""

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "over_a_setting.py"


def test_points_are_means_over_the_runs_of_a_value(tmp_path: Path) -> None:
    for name, gamma, accuracy in (("a", 0.1, 0.5), ("b", 0.1, 0.7), ("c", 0.2, 0.9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"rounds = 3\n[uefl]\ngamma = {gamma}\n")
        (tmp_path / name / "summary.json").write_text(json.dumps({"mean": {"accuracy": accuracy}}))
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "uefl.gamma", "a", "b", "c"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    points = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [(p[0], p[1], p[3]) for p in points] == [("0.1", "0.6", "2"), ("0.2", "0.9", "1")]
    assert (tmp_path / "over-a-setting.png").read_bytes().startswith(b"\x89PNG")
