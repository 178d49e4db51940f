"""``fedsilo explain``: what it prints and writes for one patient, and what it refuses."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from models.schema import Value
from server_app.cli import main
from server_app.config import resolve
from server_app.inline import run_inline
from server_app.run_directory import RunDirectory

SITES = ["cleveland", "hungary", "switzerland", "va"]
HEART: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "rounds": 2,
    "local-steps": 2,
    "dropout": 0.0,
    "mc-passes": 0,
    "device": "cpu",
    "seed": 7,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of picsr, one whose router bends, of fedavg and of local."""
    out = tmp_path_factory.mktemp("runs")
    picsr: dict[str, Value] = {"method": "picsr", "expert-rounds": 1}
    for name, values in {
        "picsr": picsr,
        "declared": picsr | {"standardise": "declared", "embedding": "mlp"},
        "fedavg": {"method": "fedavg"},
        "local": {"method": "local"},
    }.items():
        run_inline(resolve(HEART | values | {"run-name": name, "out": str(out)}), 4, draw=False)
    return out


def _explain(run: Path, site: str = "va", row: int = 3, *more: str) -> int:
    return main(["explain", str(run), "--site", site, "--row", str(row), *more])


FIGURE = r"-?\d+\.\d+"
FIRST = re.compile(
    rf"expert of (\w+): weight ({FIGURE}), says ({FIGURE}); distance ({FIGURE})", re.ASCII
)
SECOND = re.compile(r"  close by (.*); apart by (.*)")
THIRD = re.compile(rf"  score ({FIGURE}) = (.*) \(by each distance; bias last\)")


def _matched(pattern: re.Pattern[str], lines: list[str]) -> list[tuple[str, ...]]:
    found = [pattern.fullmatch(line) for line in lines]
    return [match.groups() for match in found if match is not None]


def test_a_patient_is_explained_by_three_lines_per_expert(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs / "told.json"
    assert _explain(runs / "picsr", "va", 3, "--json", str(path)) == 0
    capsys.readouterr()
    document = json.loads(path.read_text())
    path.unlink()
    before = sorted(path.name for path in (runs / "picsr").iterdir())
    assert _explain(runs / "picsr") == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("va, test row 3: truth ")
    assert "probabilities are of 'disease'; the mixture gives it 0." in title
    assert len(lines) == 12
    told = (SITES, document["weights"], document["answers"], document["distances"])
    assert _matched(FIRST, lines[::3]) == [
        (site, f"{weight:.3f}", f"{answer:.3f}", f"{distance:.2f}")
        for site, weight, answer, distance in zip(*told, strict=True)
    ]
    parts = [dict(zip(document["features"], one, strict=True)) for one in document["contributions"]]
    for part, lists in zip(parts, _matched(SECOND, lines[1::3]), strict=True):
        near, far = ([one.rpartition(" ") for one in told.split(", ")] for told in lists)
        ranked = sorted(part, key=lambda feature: abs(part[feature]))
        assert {name for name, *_ in near} == set(ranked[:3])
        assert [name for name, *_ in far] == ranked[:-4:-1]
        assert all(value == f"{part[name]:+.2f}" for name, _, value in near + far)
    for scores, (total, summands) in zip(
        document["scores"], _matched(THIRD, lines[2::3]), strict=True
    ):
        assert summands == " ".join(f"{score:+.2f}" for score in scores)
        assert total == f"{sum(scores):.2f}"
    assert sorted(path.name for path in (runs / "picsr").iterdir()) == before


@pytest.mark.parametrize(("run", "near"), [("picsr", 1e-3), ("declared", 0.05)])
def test_the_document_adds_up_and_a_picture_is_drawn(run: str, near: float, runs: Path) -> None:
    document, picture = runs / f"{run}.json", runs / f"{run}.png"
    assert _explain(runs / run, "va", 3, "--json", str(document), "--picture", str(picture)) == 0
    found = json.loads(document.read_text())
    assert found["experts"] == SITES
    assert found["features"][:3] == ["age", "sex", "trestbps"]
    assert sum(found["weights"]) == pytest.approx(1, abs=1e-5)
    assert [len(scores) for scores in found["scores"]] == [5, 5, 5, 5], "four distances and a bias"
    voices = [math.exp(sum(scores)) for scores in found["scores"]]
    assert found["weights"] == pytest.approx([voice / sum(voices) for voice in voices], abs=1e-5)
    for distance, parts in zip(found["distances"], found["contributions"], strict=True):
        assert len(parts) == len(found["features"])
        assert sum(parts) == pytest.approx(distance, rel=near, abs=1e-4)
    mixed = sum(w * a for w, a in zip(found["weights"], found["answers"], strict=True))
    assert f"gives it {mixed:.3f}" in found["title"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_other_splits_and_rows_are_other_patients(runs: Path) -> None:
    documents = []
    for more in (("--row", "3"), ("--row", "4"), ("--row", "3", "--split", "train")):
        path = runs / "one.json"
        assert _explain(runs / "picsr", "va", 3, *more, "--json", str(path)) == 0
        documents.append(json.loads(path.read_text())["distances"])
    assert documents[0] != documents[1]
    assert documents[0] != documents[2]


def test_the_weights_are_those_that_the_run_measured(runs: Path) -> None:
    test = RunDirectory(runs / "picsr").read_json("silos.json")["switzerland"]["sizes"]["test"]
    weights = []
    for row in range(test):
        path = runs / "one.json"
        assert _explain(runs / "picsr", "switzerland", row, "--json", str(path)) == 0
        weights.append(json.loads(path.read_text())["weights"])
    told = RunDirectory(runs / "picsr").read_json("routing.json")["sites"]["switzerland"]
    for index, site in enumerate(SITES):
        mean = sum(row[index] for row in weights) / test
        assert told[site]["mean"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize(
    ("run", "site", "row", "told"),
    [
        ("fedavg", "va", 0, "method 'fedavg' does not explain its answers"),
        ("local", "va", 0, "method 'local' has no shared model"),
        ("picsr", "basel", 0, "there is no silo 'basel': 4 silos are cleveland, hungary,"),
        ("picsr", "va", 45, "site va has 45 test rows, counted from 0: there is no row 45"),
        ("picsr", "va", -1, "there is no row -1"),
        ("nowhere", "va", 0, "summary.json is not there: the run has not ended"),
    ],
)
def test_what_cannot_be_explained_is_told_in_one_line(
    run: str, site: str, row: int, told: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs / "refused.json"
    assert _explain(runs / run, site, row, "--json", str(path)) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedsilo: error: ")
    assert told in error
    assert error.count("\n") == 1
    assert not path.exists()


def test_a_run_that_has_not_ended_is_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    for name in ("config.toml", "model.safetensors"):
        (cut / name).write_bytes((runs / "picsr" / name).read_bytes())
    assert _explain(cut) == 1
    assert "the run has not ended" in capsys.readouterr().err
