"""What the pages name exists: links, anchors, code paths; and the README stays short."""

import re
import subprocess
from pathlib import Path

import pytest

from fedsilo.core.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
README_LINES = 110
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    + list((ROOT / "docs").rglob("*.md"))
)
# The changelog may name what has gone
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`(?:[^`\n]|\n(?!\n))+`")  # in a paragraph, over lines too
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_FILE = re.compile(
    r"(?<![\w./<>$-])((?:[\w.-]+/)*[\w-]+\.py|"
    r"(?:benchmarks|client_app|datasets|docker|docs|models|server_app|strategies|tests)"
    r"/[\w./-]+\.(?:csv|md|png|sh|toml|yaml))\b"
)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _links(page: Path) -> list[str]:
    """Return the targets of a page's links, without those into the web."""
    prose = _CODE.sub("", _FENCE.sub("", page.read_text()))
    return [target for target in _LINK.findall(prose) if "://" not in target]


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as a forge makes them."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text()))
    bare = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in bare}


def _code_paths(page: Path) -> set[str]:
    """Return the files of this repository that a page names in code, in a line or in a block."""
    text = page.read_text()
    code = _FENCE.findall(text) + _CODE.findall(_FENCE.sub("", text))
    return {path for part in code for path in _FILE.findall(part)}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Return the paths of all files of the tree that are, or may be, committed."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no checkout")
    return [path for path in listed.stdout.splitlines() if (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_relative_link_and_anchor_resolves(page: Path) -> None:
    for target in _links(page):
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), f"{_name(page)} links {target}: no such file"
        if anchor:
            assert anchor in _anchors(aim), f"{_name(page)} links {target}: no such heading"


@pytest.mark.parametrize("page", CURRENT, ids=_name)
def test_every_code_path_that_a_page_names_exists(page: Path, tracked: list[str]) -> None:
    bare = {Path(path).name for path in tracked}
    for path in sorted(_code_paths(page)):
        there = path in tracked if "/" in path else path in bare
        assert there, f"{_name(page)} names {path}, which is no file of this tree"


def test_every_page_can_be_reached_from_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in _links(index)}
    assert not {_name(page) for page in PAGES if page != index} - {
        _name(page) for page in linked if page in PAGES
    }


def test_the_readme_is_short_and_shows_a_run() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= README_LINES
    pictures = [target for target in _links(readme) if target.endswith(".png")]
    assert len(pictures) == 1
    assert (ROOT / pictures[0]).stat().st_size < 200_000


def test_every_figure_in_the_table_of_methods_is_on_a_page_that_its_row_links() -> None:
    table = ROOT / "docs" / "methods" / "README.md"
    rows = [line for line in table.read_text().splitlines() if "../results" in line]
    measured = [row.split(" | ")[-1] for row in rows if row.count(" | ") == 3]
    assert len(measured) > 10
    for cell in measured:
        pages = "".join((table.parent / path).read_text() for path in _LINK.findall(cell))
        for figure in re.findall(r"\d*\.\d+", re.sub(r"\([^)]*\)", "", cell)):
            assert figure in pages, f"{figure} of '{cell}' is on none of its pages"


@pytest.mark.parametrize("page", ["README.md", "docs/methods/README.md"])
def test_every_method_has_a_link_to_its_page(page: str) -> None:
    linked = re.findall(r"\[(`[^]]+)\]\(", (ROOT / page).read_text())
    assert {name for text in linked for name in re.findall(r"`([a-z-]+)`", text)} >= METHODS.keys()


def test_anchors_are_those_of_a_forge(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c-d\n\n```sh\n# no heading\n```\n\n## [Linked](x.md) & more\n")
    assert _anchors(page) == {"a-b-c-d", "linked--more"}


def test_code_paths_are_found_in_lines_and_blocks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`models/a.py`, `models/<x>.py`, `python b.py c`, models/plain.py\n\n"
        "```sh\ndocker/d.sh --out docker/secrets\nruns/e.toml\n```\n"
    )
    assert _code_paths(page) == {"models/a.py", "b.py", "docker/d.sh"}
