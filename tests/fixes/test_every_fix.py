"""Every text of the source that tells to change a setting is tried by a test, or says why not."""

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve()
_ROOT = _HERE.parents[2]
_ROOMS = ("fedsilo", "models", "datasets", "strategies", "client_app", "server_app")
_NAMES_A_SETTING = re.compile(
    r"\b(?:(?<!data )(?<!silo )(?<!prediction )set|lower|raise|remove|leave|choose|take(?! part))\b"
    r"[^:;]{0,40}?'\{?[a-z][a-z0-9.{}-]*\}?'"
)
_SHORTEST = 14  # characters, without what an error fills in
# Tried in other files than those beside this one: a part of the text -> the file
ELSEWHERE = {
    "images that it has trained on might be tested": "tests/datasets/weights/test_provenance.py",
    "has no arrays of this network: for weights of": (
        "tests/datasets/weights/test_initial_weights.py"
    ),
    "a sum has room only for numbers of a known size": "tests/test_secure_end_to_end.py",
    "training samples decide a step": "tests/attacks/test_floors.py",
    "bits moves the mean by": "tests/models/privacy/test_secure_sum.py",
    "data are fewer or of another kind than": "tests/attacks/test_oracles_at_sums.py",
    "sites answered but {x} are needed": "tests/test_secure_end_to_end.py",
    "could answer, and each site's own log": "tests/test_secure_end_to_end.py",
    "summed here before under other settings": "tests/attacks/test_oracles_at_sums.py",
    "were summed here before by": "tests/attacks/test_oracles_at_sums.py",
    "adds its part to sums only with": "tests/attacks/test_oracles_at_sums.py",
    "optimiser step(s) over the samples that this hospital declares": (
        "tests/attacks/test_oracles_at_sums.py"
    ),
    "of the samples that this hospital declares": "tests/attacks/test_oracles_at_sums.py",
    "this round's sum was already unmasked with a different part": (
        "tests/client_app/privacy/test_secure_aggregation.py"
    ),
    "sites weigh themselves by their own samples": "tests/test_secure_end_to_end.py",
    "of the others, but this hospital requires": "tests/attacks/test_secure_sums.py",
    "needs at least {x} sites, but there are": "tests/strategies/loop/test_robust.py",
    "needs at least three sites": "tests/test_secure_end_to_end.py",
    "needs more than the sum of the sites' arrays": "tests/test_secure_end_to_end.py",
    "partition 'unseen' needs at least 2 silos, but": "tests/datasets/partition/test_label_sets.py",
    "but silo set '{x}' has {x} silos: remove": "tests/datasets/partition/test_unseen.py",
    "sites as one: use --engine inline, or": "tests/fedsilo/engines/test_together.py",
    "'machine.vectorised' is {x}, but {x}: set": "tests/fixes/test_training.py",
    "only emulates bf16, which is slower than": "tests/client_app/training/test_compute.py",
    "bring it back, or choose another ": "tests/attacks/test_fits_that_depart.py",
    "would always be 0: list the values that mean": "tests/datasets/tables/test_table_data_set.py",
    "contains non-finite values, which cannot travel": "tests/strategies/wire/test_compressed.py",
    "so there is nothing to compare": "tests/fedsilo/comparison/test_over_seeds.py",
    "have the same split, which": "tests/fedsilo/comparison/test_over_seeds.py",
    "would decide what leaves, but": "tests/attacks/test_floors.py",
    "or $FEDSILO_CACHE to another": "tests/fedsilo/core/files/test_sealed_folders.py",
    "is the same for all patients: leave it out": "tests/methods/test_glm.py",
    "patients determine no next one (the Hessian": "tests/models/maths/test_glm.py",
    "follows from the columns before it (collinear)": "tests/methods/test_glm.py",
    "grows without end, because the column": "tests/methods/test_glm.py",
    "the coefficients have not converged in": "tests/methods/test_glm.py",
}
# A part of the text -> why no test can follow it
EXEMPT: dict[str, str] = {
    "only a Cox regression has a time: set": "'fedsilo fit' sets it",
    "a Cox regression needs a time: name": "'fedsilo fit' sets it",
    "needs a 'time' for task 'survival', and only": "a schema, not a setting",
    "the label is the time to an event, which a": "'fedsilo fit' refuses it before",
    "a regression measures no network: set": "'fedsilo fit' sets it",
    "a regression is of the patients of all sites: set": "'fedsilo fit' sets it",
    "the sums are too large for a secret sum": "its remedy has not been tried yet",
    "lack the same values, so sums with": "its remedy has not been tried yet",
    "mixes the models of two sites or more": "a simulation of one site is another run",
    ": lower 'privacy.sums-min-count' here, or": "the lines before it say which site",
    "metrics.csv has all values, for yourself": "a hint below a table, no error",
}


@functools.cache
def sentences() -> dict[str, str]:
    """Return every text that tells to change a setting, gaps as ``{x}``, and where it stands."""
    found = {}
    for room in _ROOMS:
        for path in sorted((_ROOT / room).rglob("*.py")):
            tree = ast.parse(path.read_text())
            parts = {
                id(part)
                for node in ast.walk(tree)
                if isinstance(node, ast.JoinedStr)
                for part in ast.walk(node)
                if part is not node
            }
            for node in ast.walk(tree):
                text = "" if id(node) in parts else _text(node)
                if "\n" not in text and _NAMES_A_SETTING.search(text):
                    found[text] = f"{path.relative_to(_ROOT)}:{getattr(node, 'lineno', 0)}"
    return found


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "{x}" for v in node.values)
    return ""


def _bare(text: str) -> str:
    """Return a text without what an error fills in: quoted words and numbers."""
    return re.sub(r"'[^'\s]*'|\d+", "", text)


def _tried() -> list[str]:
    """Return what the tests beside this one try: their ``CASES``, and parts that they name."""
    told: list[str] = []
    for path in sorted(set(_HERE.parent.glob("test_*.py")) - {_HERE}):
        spec = importlib.util.spec_from_file_location(f"mends_{path.stem}", path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        told += [case.told for case in getattr(module, "CASES", ())]
        told += getattr(module, "TRIED", ())
    return told


def test_every_text_that_names_a_fix_is_tried() -> None:
    told = [_bare(part) for part in [*_tried(), *ELSEWHERE, *EXEMPT]]
    assert [part for part in told if len(part) < _SHORTEST] == [], "of any text at all"
    untried = [
        f"{where}: {text}"
        for text, where in sentences().items()
        if not any(part in _bare(text) for part in told)
    ]
    assert untried == []


@pytest.mark.parametrize("part", [*ELSEWHERE, *EXEMPT])
def test_exempt_or_elsewhere_text_exists(part: str) -> None:
    assert any(_bare(part) in _bare(text) for text in sentences())
    assert (_ROOT / ELSEWHERE.get(part, "tests")).exists()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("it is 3: lower 'rounds'", True),
        ("choose another '{x}'", True),
        ("data set 'digits' has no masks", False),
        ("2 of 3 sites can take part, but 'run.min-sites' needs 3", False),
    ],
)
def test_text_that_names_a_fix_is_recognised(text: str, names: bool) -> None:
    assert bool(_NAMES_A_SETTING.search(text)) == names
