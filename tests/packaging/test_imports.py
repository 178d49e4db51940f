"""Only ``fedsilo`` is imported: a bare ``datasets`` would be Hugging Face's, or nothing."""

import re
import subprocess
from pathlib import Path

# History, and what means the package of Hugging Face
_OTHERS = (
    *("CHANGELOG.md", "docs/results", "tests/packaging/"),
    "fedsilo/api/hugging_face.py",
)
ROOT = Path(__file__).resolve().parents[2]
_NAMES = "(?:client_app|datasets|models|server_app|strategies)"
_BARE = re.compile(
    rf"^[ \t\">]*(?:from|import)[ ]+{_NAMES}\b|-m {_NAMES}\b|import_module\([\"']{_NAMES}\b", re.M
)


def test_no_file_imports_a_folder_without_the_package() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.ipynb", "*.yaml", "*.toml", "Makefile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and not name.startswith(_OTHERS):
            text = path.read_text(encoding="utf-8")
            found += [f"{name}: {match[0].strip()}" for match in _BARE.finditer(text)]
    assert found == []


def test_every_test_path_in_the_makefile_exists():
    makefile = (ROOT / "Makefile").read_text()
    paths = set(re.findall(r"(?<![\w/])tests/[\w/.]+", makefile))
    assert paths
    missing = [path for path in sorted(paths) if not (ROOT / path).exists()]
    assert not missing
