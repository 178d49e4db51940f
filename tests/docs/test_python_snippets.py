"""The Python that README and the pages print runs as it is printed."""

import re
from pathlib import Path

import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer

import fedsilo

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OLD = re.compile(r"fedsilo\.server_app\.(?:api|studies\.api)\b")


def _block(page: str, number: int = 0) -> str:
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))[number]


def _tumours() -> pd.DataFrame:
    """Return 60 rows with five numbers and a label of two classes."""
    frame = load_breast_cancer(as_frame=True).frame.sample(60, random_state=0)
    return frame.iloc[:, [0, 1, 2, 3, 4, -1]]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSILO_CACHE", str(tmp_path / "cache"))


def test_the_readme_trains_on_tables_of_your_own(tmp_path: Path) -> None:
    frame = _tumours().rename(columns={"target": "diagnosis"})
    for name, part in {"north": frame[:30], "south": frame[30:]}.items():
        part.to_csv(f"{name}.csv", index=False)
    names: dict[str, fedsilo.Run] = {}
    exec(_block("README.md").replace('{"learning-rate"', '{"rounds": 2, "learning-rate"'), names)
    assert list(names["run"].sites["site"]) == ["north", "south"]


def test_the_page_on_python_simulates_and_reports(tmp_path: Path) -> None:
    exec(_block("docs/python.md"), {})
    assert (tmp_path / "runs" / "digits" / "summary.json").is_file()
    assert "</html>" in (tmp_path / "digits.html").read_text()


def test_own_data_come_from_frames(tmp_path: Path) -> None:
    frame = _tumours().rename(columns={"target": "ill"})
    names = {"frame": frame[:30], "other": frame[30:]}
    block = _block("docs/own-data.md")
    assert '"rounds": 10' in block
    exec(block.replace('"rounds": 10', '"rounds": 2'), names)
    assert names["run"].summary["rounds"] == 2


@pytest.mark.parametrize("folder", ["docs", "fedsilo/api/project"])
def test_no_page_imports_the_commands_from_elsewhere(folder: str) -> None:
    pages = [ROOT / "README.md", *(ROOT / folder).rglob("*")]
    kinds = (".md", ".py", ".ipynb")
    texts = {p: p.read_text(encoding="utf-8") for p in pages if p.suffix in kinds}
    found = {
        str(page): match[0]
        for page, text in texts.items()
        for match in [_OLD.search(text)]
        if match and "for one\nmore version" not in text and page.parent.name != "site"
    }
    assert found == {}
