"""Sites and classes named in other scripts: from folders of images to table and report."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest

from fedsilo.cli.main import main
from tests.support.data_folders import save_picture

SITES = ("Süd", "St. Mary's", "東京")


def write_in_other_scripts(folder: Path) -> Path:
    """Write images of three sites and two classes, one site's folder named as a Mac names it."""
    for offset, site in enumerate(SITES):
        rng = np.random.default_rng(offset)
        for label, name in enumerate(("gutartig, ü", "悪性 <b>")):
            own = folder / unicodedata.normalize("NFD", site) / name
            own.mkdir(parents=True)
            for number in range(8):
                save_picture(own / f"{number}.png", rng, label=label)
    return folder


@pytest.mark.usefixtures("in_process")
def test_names_in_any_script_lead_to_table_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_in_other_scripts(tmp_path / "data")
    words = ["--out", str(tmp_path), "--seeds", "1", "--engine", "inline"]
    for change in (
        *("dataset=folder", f"data.dir={data}", "data.image-size=16", "rounds=1"),
        *("train.local-steps=1", "privacy.sums-min-count=1", "train.mc-passes=0"),
    ):
        words += ["--set", change]
    assert main(["compare", "fedavg", "local", *words, "--csv", str(tmp_path / "c.csv")]) == 0
    table = (tmp_path / "c.csv").read_text()
    assert all(f"fedavg,fedavg,{site},accuracy" in table for site in SITES)
    own = {path.name for path in (tmp_path / "local-seed0" / "sites").iterdir()}
    assert own == {"S+fc+d", "St.+20+Mary+27+s", "+6771.4eac+"}
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "local-seed0"), "--out", str(page)]) == 0
    text = page.read_text()
    assert "Süd" in text
    assert "東京" in text
    assert "<b>" not in text
