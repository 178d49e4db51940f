"""The site: a strict build, pages made from the code, and nothing that is loaded from the web."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

import fedsilo
from fedsilo.core.methods import known_defaults

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "docs" / "site"
# What a browser fetches when it shows a page
_LOADED = re.compile(r"<(?:script|img|link)[^>]+(?:src|href)=\"(https?:[^\"]*)")


def _module(name: str) -> ModuleType:
    pytest.importorskip("mkdocs", reason="no MkDocs: install the extra 'docs'")
    spec = importlib.util.spec_from_file_location(f"site_{name}", MADE / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generated() -> Iterator[ModuleType]:
    """Return the module that makes pages from the code: the one that the build imports too.

    It reads all sources, which takes seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        module = _module("generated")
        patch.setitem(sys.modules, "generated", module)
        yield module


@pytest.fixture(scope="module")
def site(generated: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a site as ``make docs`` builds it, notebooks without outputs."""
    for module in ("material", "mkdocstrings", "nbconvert"):
        pytest.importorskip(module, reason=f"no {module}: install the extra 'docs'")
    from mkdocs.__main__ import cli

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("DOCS_EXECUTE", "no")
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.setattr(sys, "path", [*sys.path])  # the hooks put folders before it
        # In this process, which has imported what the pages are made of
        built = CliRunner().invoke(cli, ["build", "--strict", "--site-dir", str(folder)])
    assert built.exit_code == 0, built.output[-3000:]
    return folder


def test_every_page_of_the_documentation_is_in_the_site(site: Path) -> None:
    pages = [p for p in (ROOT / "docs").rglob("*") if p.suffix in (".md", ".ipynb")]
    made = [p.with_stem("index") if p.stem == "README" else p for p in pages]
    names = {str(p.relative_to(ROOT / "docs").with_suffix(".html")) for p in made}
    names |= {"overview.html", "reference/errors.html"}
    assert sorted(name for name in names if not (site / name).is_file()) == []


def test_no_page_of_the_site_loads_anything_from_the_web(site: Path) -> None:
    loaded = {
        url
        for page in site.rglob("*.html")
        for url in _LOADED.findall(page.read_text())
        if 'rel="canonical"' not in url
    }
    assert loaded == set()


def test_search_works_without_a_server(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = ")
    assert "train.local-epochs" in index
    assert 'src="iframe-worker.js"' in (site / "index.html").read_text()


def test_search_shows_guides_before_reference(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text()
    pages = json.loads(index.removeprefix("var __index = ").rstrip(";\n "))["docs"]
    boosts = {page["location"]: page.get("boost", 1.0) for page in pages}
    assert boosts["first-steps.html"] > boosts["architecture.html"]
    assert boosts["architecture.html"] > boosts["reference/settings.html"]


def test_home_has_three_doors_and_the_version(site: Path) -> None:
    home = (site / "index.html").read_text()
    doors = home.partition('class="doors"')[2].partition("All pages by their kind")[0]
    assert doors.count("<img") == 3
    assert f"Version {fedsilo.__version__}" in home
    assert 'href=".."' not in home


def test_each_error_code_has_an_anchor_with_meaning_and_fix(
    site: Path, generated: ModuleType
) -> None:
    page = (site / "reference" / "errors.html").read_text()
    for error in generated.coded_errors():
        assert f'id="{error.code}"' in page
        assert "Fix: " in str(error.__doc__), error.code


def test_settings_page_has_every_setting_that_a_run_knows(generated: ModuleType) -> None:
    listed = re.findall(r"^\| `([^`]+)`\{id=", generated.settings_page(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == set(known_defaults())


def test_settings_page_states_default_range_and_meaning(generated: ModuleType) -> None:
    (line,) = [
        row for row in generated.settings_page().splitlines() if row.startswith("| `rounds`")
    ]
    assert line == '| `rounds`{id="rounds"} | `30` | at least 1 | communication rounds |'


def test_commands_page_has_the_options_of_a_command_in_a_group(generated: ModuleType) -> None:
    page = generated.commands_page()
    assert "## deploy up\n" in page
    assert "--sites" in page.partition("## deploy up\n")[2].partition("\n## ")[0]


def test_messages_of_an_error_are_found_by_its_code(generated: ModuleType) -> None:
    texts = generated.messages()
    assert (
        "--site needs --deployment: name the deployment, or give 'site' in --node-config"
        in texts["setting"]
    )
    assert all(texts[error.code] for error in generated.coded_errors())


def test_every_error_that_is_raised_has_a_code(generated: ModuleType) -> None:
    without = [
        f"{name}:{number}"
        for name, text in generated._sources()
        for number, line in enumerate(text.splitlines(), 1)
        if line.lstrip().startswith("raise FedsiloError")
    ]
    assert without == []


def test_make_docs_is_strict() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ndocs: ")[2].splitlines()[1]
    assert recipe.endswith(" -m mkdocs build --strict")  # with --quiet it ignores warnings


def test_every_public_name_has_a_docstring(generated: ModuleType) -> None:
    assert generated.undocumented() == []


def test_a_public_name_without_a_docstring_is_found(
    generated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedsilo.simulate, "__doc__", None)
    assert generated.undocumented() == ["fedsilo.api.running.simulate"]


def test_navigation_is_the_headings_and_first_links_of_the_index() -> None:
    index = "# All\n\n## Guides\n\n- [A](a.md): x, [B](b.md)\n\n### More\n\n- [N](n/c.ipynb)\n"
    assert _module("hooks").navigation(index) == [
        {"Home": "README.md"},
        {"Guides": [{"A": "a.md"}, {"More": [{"N": "n/c.md"}]}]},
    ]


def test_pictures_of_the_gallery_follow_a_command_and_are_small() -> None:
    page = ROOT / "docs" / "gallery.md"
    steps = _module("gallery")._STEP.findall(page.read_text())
    pictures = [picture for _, picture, _ in steps if picture]
    assert steps[0][0].startswith("printf")
    assert len(pictures) == page.read_text().count("![") > 5
    assert [p for p in pictures if (page.parent / "img" / p).stat().st_size > 100_000] == []


def test_a_bar_in_code_of_a_table_loses_its_backslash() -> None:
    hooks = _module("hooks")
    shown = hooks._BAR.sub(lambda found: found[0].replace("\\|", "|"), r"| `a\|b` | c\|d |")
    assert shown == r"| `a|b` | c\|d |"
