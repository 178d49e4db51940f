"""The Python packages that the borrowed machine lacks.

    python benchmarks/gpu_kit/packages.py lacking           # what nobody brings, by two lists
    python benchmarks/gpu_kit/packages.py pack WHEELS FILE  # the wheels as an archive FILE.tar.xz
    python benchmarks/gpu_kit/packages.py check             # there: versions, and what fails

``machine-packages.txt`` lists what the machine has, ``wheels.txt`` what travels. An archive holds
the wheels' files as an installation would lay them out, less what no run needs: symbols of compiled
code (170 of POT's 174 MB), a second solver of SCS, and the packages' own tests. Libraries that two
packages bring under the same name, which has a digest of their content, are there once.
"""

import importlib
import importlib.metadata
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

KIT = Path(__file__).resolve().parent
ROOT = KIT.parents[1]
# The engines inline and processes do without Ray; uv only makes releases
_NOT_NEEDED = {"ray", "uv"}
_LEFT_OUT = ("scs/_scs_mkl*.so", "cvxpy/tests", "tests", "bin", "*/tests")
# Imported by functions when they are called, so that importing every module does not show them
_LATE = ("ot", "cvxpylayers.torch", "captum.attr", "pydicom", "pooch", "dp_accounting.rdp", "timm")
_ROOMS = ("client_app", "datasets", "models", "server_app", "strategies")
_SHOWN = ("torch", "torchvision", "numpy", "pandas", "scikit-learn", "timm", "flwr", "pydantic")


def dependencies() -> list[str]:
    """Return the requirements of fedsilo itself, without its extras."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(content["project"]["dependencies"])


def name_of(requirement: str) -> str:
    """Return a requirement's package in the form in which registries compare names."""
    plain = re.split(r"[\[<>=!~;@ ]", requirement.strip(), maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", plain).lower()


def lacking() -> list[str]:
    """Return the dependencies that neither the machine nor ``wheels.txt`` has, in order."""
    brought = set()
    for file in ("machine-packages.txt", "wheels.txt"):
        brought |= {name_of(one) for one in (KIT / file).read_text().split()}
    return sorted({name_of(one) for one in dependencies()} - brought - _NOT_NEEDED)


def pack(wheels: Path, archive: Path) -> None:
    """Write the files of a folder's wheels to an archive, as one folder of packages."""
    with tempfile.TemporaryDirectory(prefix="fedsilo-gpu-") as temporary:
        site = Path(temporary) / "site"
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as content:
                content.extractall(site)
        _merge_data(site)
        for pattern in _LEFT_OUT:
            for path in list(site.glob(pattern)):
                _remove(path)
        _strip(site)
        _share_libraries(site)
        with tarfile.open(archive, "w:xz", preset=6) as packed:
            packed.add(site, ".")


def _merge_data(site: Path) -> None:
    """Move modules that a wheel has in NAME.data to where Python finds them; scripts are lost."""
    for data in site.glob("*.data"):
        for part in ("purelib", "platlib"):
            if (data / part).is_dir():
                shutil.copytree(data / part, site, dirs_exist_ok=True)
        shutil.rmtree(data)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _strip(site: Path) -> None:
    """Take symbols off extension modules. Bundled libraries (*.libs) have been patched and stay."""
    if shutil.which("strip") is None:
        sys.exit("'strip' (package binutils) is missing: without it the archive is too large")
    for module in site.rglob("*.so"):
        if not module.parent.name.endswith(".libs"):
            subprocess.run(["strip", "--strip-unneeded", str(module)], check=True)


def _share_libraries(site: Path) -> None:
    """Replace a bundled library that another package brings under the same name by a link."""
    first: dict[str, Path] = {}
    for library in sorted(site.glob("*.libs/*")):
        known = first.setdefault(library.name, library)
        if known is not library:
            library.unlink()
            library.symlink_to(os.path.relpath(known, library.parent))


def unmet() -> Iterator[str]:
    """Yield a line for each dependency that is absent here or has another version."""
    from packaging.requirements import Requirement

    for text in dependencies():
        wanted = Requirement(text)
        if name_of(text) in _NOT_NEEDED:
            continue
        try:
            found = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{wanted.name} is missing"
            continue
        if found not in wanted.specifier:
            yield f"{wanted.name} is {found}, but fedsilo needs {wanted.specifier}"


def not_imported() -> Iterator[str]:
    """Import every module of fedsilo and what functions import; yield a line for each failure."""
    sys.path.insert(0, str(ROOT))
    names = list(_LATE)
    # In a checkout these rooms are beside fedsilo/, where a walk through fedsilo would never end
    for name in ("fedsilo", *(f"fedsilo.{room}" for room in _ROOMS)):
        names.append(name)
        if not _import_fault(name):
            places = sys.modules[name].__path__[:1]
            names += [one.name for one in pkgutil.walk_packages(places, f"{name}.", names.append)]
    for name in names:
        # To import these would run them
        if not name.endswith("__main__") and (fault := _import_fault(name)):
            yield fault


def _import_fault(name: str) -> str:
    """Import a module; return a line that says why it failed, or an empty string."""
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{name}: {error!r}"[:300]
    return ""


def check() -> int:
    """Print the versions here and every fault; return 1 if there is one, otherwise 0."""
    versions = [f"Python {sys.version.split()[0]}"]
    for name in _SHOWN:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    print(", ".join(versions))
    faults = [*unmet(), *not_imported()]
    for fault in faults:
        print(f"  {fault}")
    print(f"{len(faults)} faults of packages and imports")
    return int(bool(faults))


def main() -> int:
    """Do what the command line asks for; return the exit code."""
    words = sys.argv[1:]
    if words == ["check"]:
        return check()
    if words == ["lacking"]:
        for name in lacking():
            print(f"neither the machine nor wheels.txt has {name}: pin it there, with its needs")
        return 0
    if len(words) == 3 and words[0] == "pack":
        pack(Path(words[1]), Path(words[2]))
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
