"""What MkDocs does beside its own: navigation, pages made from the code, notebooks, links."""

import logging
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INDEX = "README.md"
# Pages beside docs/, and where the site has them
OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
# Headings of the index whose pages the search shows first
_FIRST = ("Tutorials", "How-to guides")
_ITEM = re.compile(r"^- \[([^]]+)\]\(([^)#]+)\)", re.MULTILINE)
_LINK = re.compile(r"(\]\(|(?:src|href|srcset)=\")([^)\"\s#:]+)(?=[)\"#])")
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_ROOM = re.compile(r"<b>(\w+)</b>: (.*?)\"\]", re.DOTALL)
_ARROW = re.compile(r"^ +(\w+) --(?: (\w+) --)?> (\w+)$", re.MULTILINE)
_BADGES = re.compile(r"^\[?!\[[^]]*\]\(https://[^)]*\).*$", re.MULTILINE)
_BAR = re.compile(r"(?<=[ |])`[^`\n]*\\\|[^`\n]*`")
_log = logging.getLogger("mkdocs.hooks")


def _generated() -> Any:
    """Import what makes pages from the code; only a build needs it."""
    sys.path[:0] = [str(HERE), str(ROOT)]
    import generated

    return generated


@event_priority(100)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the package as installed, for mkdocstrings, and the navigation from the index."""
    package = ROOT / "build" / "package" / "fedsilo"
    package.mkdir(parents=True, exist_ok=True)
    folders = [ROOT / n for n in ("models", "datasets", "strategies", "client_app", "server_app")]
    for target in (*folders, *(ROOT / "fedsilo").iterdir()):
        if not (package / target.name).exists():
            (package / target.name).symlink_to(target)
    if not os.environ.get("MIKE_DOCS_VERSION"):
        config.extra.pop("version", None)  # there is no list of versions beside the site
    config.repo_url = config.repo_url or source_address()
    config.nav = navigation((ROOT / "docs" / INDEX).read_text(encoding="utf-8"))
    return config


def source_address() -> str:
    """Return the web address of the source: $DOCS_SOURCE, else that of the git remote 'origin'.

    The result is empty if there is neither, or if the remote is no address of the web.
    """
    given = os.environ.get("DOCS_SOURCE", "")
    if given:
        return given
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    # An address for ssh names the same pages; a password in an address must not be published
    told = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", told)
    found = re.fullmatch(r"https?://(?:[^@/]*@)?(.+?)(?:\.git)?/?", told)
    return f"https://{found[1]}" if found else ""


def navigation(index: str) -> list[dict[str, Any]]:
    """Return the navigation of an index: headings of two levels, and the first link of each item.

    Pages made from the code follow those of "Reference".
    """
    nav: list[dict[str, Any]] = [{"Home": INDEX}]
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        first, *groups = re.split(r"^### ", body, flags=re.MULTILINE)
        items: list[dict[str, Any]] = _items(first)
        items += [{g.partition("\n")[0]: _items(g)} for g in groups]
        if title == "Reference":
            items += [{name: path} for path, (name, _) in _generated().PAGES.items()]
        nav.append({title: items})
    return nav


def _items(text: str) -> list[dict[str, Any]]:
    return [
        {title: OUTSIDE.get(target.removeprefix("../"), target).replace(".ipynb", ".md")}
        for title, target in _ITEM.findall(text)
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages made from the code, those beside docs/, and the notebooks."""
    generated = _generated()
    for name in generated.undocumented():
        _log.warning("public name without a docstring: %s", name)
    for path, (_, make) in generated.PAGES.items():
        files.append(File.generated(config, path, content=make()))
    for source, path in OUTSIDE.items():
        files.append(File.generated(config, path, content=(ROOT / source).read_text("utf-8")))
    for name in ("site.css", "iframe-worker.js"):
        files.append(File.generated(config, name, content=(HERE / name).read_text("utf-8")))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        for path, content in _converted(notebook).items():
            files.append(File.generated(config, f"notebooks/{path}", content=content))
    return files


def _converted(notebook: Path) -> dict[str, str | bytes]:
    """Return a notebook's page and its pictures by name, executed unless DOCS_EXECUTE=no."""
    import nbformat
    from nbconvert import MarkdownExporter

    cells = nbformat.read(notebook, as_version=4)
    if os.environ.get("DOCS_EXECUTE") != "no":
        _execute(cells)
    text, resources = MarkdownExporter().from_notebook_node(cells)
    download = f"\n\n[Download this notebook]({notebook.name})\n"
    pictures = {f"{notebook.stem}-{name}": data for name, data in resources["outputs"].items()}
    for name in resources["outputs"]:
        text = text.replace(f"]({name})", f"]({notebook.stem}-{name})")
    return {f"{notebook.stem}.md": text + download, **pictures}


def _execute(cells: Any) -> None:
    from tempfile import TemporaryDirectory

    from nbclient import NotebookClient

    with TemporaryDirectory(prefix="fedsilo-docs-") as folder:
        paths = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), paths])
        NotebookClient(cells, timeout=600, resources={"metadata": {"path": folder}}).execute()


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where the site has their target, and list the pages made from the code."""
    place = page.file.src_uri
    page.meta.setdefault("search", {"boost": boost_of(place)})
    if place == INDEX:
        # On a forge, the folder above docs/ is the source
        address = config.repo_url or "architecture.md"
        markdown = markdown.replace("[source](..)", f"[source]({address})")
    source = {new: old for old, new in OUTSIDE.items()}.get(place, f"docs/{place}")
    if place == INDEX:
        made = _generated().PAGES.items()
        listed = "\n".join(f"- [{name}]({path})" for path, (name, _) in made)
        markdown = markdown.replace("## Project\n", f"{listed}\n\n## Project\n")
    # A bar in code needs no backslash here; on a forge it does
    markdown = _BAR.sub(lambda found: found[0].replace("\\|", "|"), markdown)
    markdown = _MERMAID.sub(lambda found: _rooms(found[1]), _BADGES.sub("", markdown))

    def pointed(found: re.Match[str]) -> str:
        target = os.path.normpath(ROOT / source / ".." / found[2])
        return found[1] + (_in_site(Path(target), place, config, files) or found[2])

    return _LINK.sub(pointed, markdown)


def boost_of(place: str) -> float:
    """Return the weight of a page in the search: guides come before explanations and reference."""
    if place.startswith(("reference/", "results/")) or place in ("changelog.md", "licences.md"):
        return 0.1
    if place in _guides():
        return 2.0
    return 1.0


@cache
def _guides() -> set[str]:
    """Return the pages of the tutorials and how-to guides in the index."""
    pages: set[str] = set()
    for part in re.split(r"^## ", (ROOT / "docs" / INDEX).read_text("utf-8"), flags=re.MULTILINE):
        if part.partition("\n")[0] in _FIRST:
            pages |= {target.replace(".ipynb", ".md") for _, target in _ITEM.findall(part)}
    return pages


def _in_site(target: Path, place: str, config: MkDocsConfig, files: Files) -> str | None:
    """Return how the page ``place`` links a file of this repository, or None if it is none."""
    if not target.is_file() or ROOT not in target.parents:
        return None
    path = target.relative_to(ROOT).as_posix()
    if path in OUTSIDE:
        path = OUTSIDE[path]
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
        page = re.sub(r"\.ipynb$", ".md", path)
        path = page if page != path and not place.startswith("notebooks/") else path
    elif files.get_file_from_path(path) is None:
        files.append(File(path, str(ROOT), config.site_dir, use_directory_urls=False))
    return os.path.relpath(path, Path(place).parent)


def _rooms(drawing: str) -> str:
    """Return the drawing of the rooms as boxes: Mermaid would be loaded from the web."""
    below: dict[str, list[str]] = {}
    for room, only, other in _ARROW.findall(drawing):
        below.setdefault(room, []).append(other + (f" ({only})" if only else ""))
    boxes = "".join(
        f"<div><b>{name}</b>: {what}"
        + (f"<br>imports {', '.join(below[name])}</div>" if name in below else "</div>")
        for name, what in _ROOM.findall(drawing)
    )
    return f'<div class="rooms">{boxes}</div>\n' if boxes else f"```text\n{drawing}```\n"
