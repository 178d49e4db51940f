"""Pages, notebooks, messages, templates and docstrings avoid words that were odd and frequent.

Each pattern has the plain word next to it. A lookahead in a pattern leaves out the word's ordinary
meaning; why is said there. Code in a page, such as the setting ``trust=nobody``, is not prose.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("models", "datasets", "strategies", "client_app", "server_app")
FOLDERS = sorted({path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")})
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    + [path for kind in ("*.md", "*.ipynb") for path in (ROOT / "docs").rglob(kind)]
)
KINDS = ("toml", "yaml", "html", "j2")  # help lines, texts about experiments, templates
TEXTS = sorted(
    path for room in ROOMS for kind in KINDS for path in (ROOT / room).rglob(f"*.{kind}")
)
TEXTS += [ROOT / "simulation.yaml"]

WORDS = {
    r"\b(anew|afresh)\b": "again, re-initialised",
    r"\bmend(s|ed|ing)?\b": "fix",
    # A symbol stands for something, an outlier stands out, a stand-in is a thing
    r"\b(stands?|stood)\b(?! (for|out)\b|-ins?\b)": "is, is written",
    # A number lies between bounds
    r"\b(lies?|lain)\b(?! (between|within|outside|above|below)\b)": "is",
    # A folder is laid out in a certain way
    r"\blaid\b(?! out\b)": "put, re-initialised",
    # Some arguments of functions have such names: "told: training samples"
    r"\btold\b(?!:)": "reported, sent",
    r"\btells? of\b": "reports, reveals",
    # Data are held out
    r"\bheld\b(?![ -]out\b)": "kept, compared",
    # "Of the 12 sites, 3 failed" is ordinary English
    r"(?:^|(?<=[.!?] ))Of (?!((the|these|all) )?\d)": "subject first: 'For X, ...', 'X has ...'",
    r"(?:^|(?<=[.!?] ))So (is|are|does|do|has|have) ": "subject first",
    r"\bby Ray\b": "with Ray",
    r"\bbegan at\b": "before training",
    r"\b(went|is|was|newest) whole\b|\bwhole one\b": "complete",
    r"\bbeside\b(?!:)": "next to, with, in addition to, compared with",
    r"\b(that|what) came\b": "received, what was received",
    r"\b(goes|going|went|go) on (?!to\b)": "continues",
    r"\bof no use\b": "unusable",
    r"\bto be had\b": "available",
    r"\bat hand\b": "available",
    r"\b[Ww]hoever\b": "anyone who, a person who",
    r"\bmade-up\b": "synthetic",
    r"\bha(s|ve) alike\b": "share, have in common",
    r"\bweighed\b(?!:)": "weighted",
    r"\brunning figures\b": "running statistics",
    # "There is no file" is ordinary English, and so is "is no longer", "is no more than"
    r"(?<![Tt]here )\b(is|are|was|were) no (?!(longer|more|fewer|such|\w+er than)\b)[a-z]": "not a",
    r"; (empty|none|None|0): ": "', or 0 for ...', 'An empty value means ...'",
}


def _prose(page: Path) -> str:
    """Return a page's text without code, links and line breaks inside a paragraph."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    return re.sub(r"(?<!\n)\n(?![\n|-])", " ", text) if page in PAGES else text


def _strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield a module's strings of more than one word, docstrings too, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.sub(r"``[^`]*``", "", " ".join(node.value.split()))
            if " " in text:
                yield node.lineno, text


def _odd(text: str) -> Iterator[str]:
    """Yield what is odd in a text, with its surroundings and the plain word."""
    for pattern, plain in WORDS.items():
        for hit in re.finditer(pattern, text, flags=re.MULTILINE):
            around = text[max(0, hit.start() - 30) : hit.end() + 20].replace("\n", " ")
            yield f"'{hit.group().strip()}' in '{around}': write {plain}"


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES + TEXTS, ids=_name)
def test_page_has_no_odd_word(page: Path) -> None:
    found = list(_odd(_prose(page)))
    assert not found, "\n".join([f"{_name(page)}:", *found])


@pytest.mark.parametrize("folder", FOLDERS, ids=_name)
def test_strings_of_a_folder_have_no_odd_word(folder: Path) -> None:
    found = [
        f"{_name(path)}:{line}: {odd}"
        for path in sorted(folder.glob("*.py"))
        for line, text in _strings(path)
        for odd in _odd(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It is drawn anew.", 1),
        ("Of PICSR it is the whole mixture.", 1),
        ("Of the 12 sites, 3 failed.", 0),
        ("this is no number", 1),
        ("There is no number.", 0),
        ("the file lies in the folder", 1),
        ("the mean lies between 0 and 1", 0),
        ("K stands for classes", 0),
        ("after it stands the value", 1),
        ("data that are held out", 0),
    ],
)
def test_odd_word_is_found_and_its_ordinary_meaning_is_not(text: str, count: int) -> None:
    assert len(list(_odd(text))) == count
