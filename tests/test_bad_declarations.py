"""Whatever stands in a YAML file that somebody wrote: it is read, or refused in one line."""

import copy
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.client_app.site.policy import SiteFile, read_site_file
from fedsilo.comparison.tune import Tuning
from fedsilo.core.errors import FedsiloError
from fedsilo.datasets.images.declaration import Declaration
from fedsilo.datasets.radiographs.mammography import MAMMOGRAPHY
from fedsilo.datasets.silo.declared_silos import read_declared
from fedsilo.datasets.tables.schema import TableSchema, read_schema
from fedsilo.engines.experiments import read_experiments, read_section

SCHEMA: dict[str, Any] = {
    "columns": [
        {"name": "age", "mean": 55.0, "std": 10.5},
        {"name": "pain", "kind": "categorical", "levels": ["a", "b"]},
    ],
    "label": {"column": "sick", "classes": {"healthy": [0], "ill": [1]}},
    "missing": ["NA"],
    "policy": "drop",
    "header": True,
    "delimiter": ",",
    "test-share": 0.3,
    "split-seed": 4,
    "sites": {"north": "north.csv"},
}
IMAGES: dict[str, Any] = {
    "sites": {"north": "north.csv"},
    "classes": {"benign": ["nevus"], "malignant": ["melanoma"]},
    "image-size": 64,
    "test-share": 0.2,
    "bits": 12,
}
SITE: dict[str, Any] = {
    "site": "north",
    "methods": ["fedavg"],
    "datasets": ["table"],
    "records": ["*"],
    "refused-records": ["arrays/maps/*"],
    "max-rounds": 3,
    "delta": 0.5,
    "allow-folds": True,
    "audit-log": "/log",
}
EXPERIMENTS: dict[str, Any] = {
    "tuning": {"trials": 2},
    "experiments": {
        "first": {"about": "x", "config": {"rounds": 2}, "grid": {"rounds": [1, 2]}},
        "second": {"base": "first", "config": {"seed": 1}, "resources": {"cpus": 1}},
    },
}


def _site_file(path: Path) -> SiteFile:
    node = {"site": "north", "site-file": str(path)}
    return read_site_file(Context(1, 1001, node, RecordDict(), {}))


def _simulation(path: Path) -> tuple[dict[str, Any], Tuning]:
    return read_experiments(path), read_section(path, "tuning", Tuning)


READERS: dict[str, tuple[Callable[[Path], Any], dict[str, Any], type]] = {
    "schema": (read_schema, SCHEMA, TableSchema),
    "images": (lambda path: read_declared(path, MAMMOGRAPHY.model), IMAGES, Declaration),
    "site": (_site_file, SITE, SiteFile),
    "experiments": (_simulation, EXPERIMENTS, tuple),
}

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["<<", "=", "*", "all", "a\nb", "1", "yes", "north", "fedavg", "arrays/"]),
    st.sampled_from([10**400, datetime.date(2001, 2, 3), datetime.datetime(2001, 2, 3), b"\xff"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(SCALARS, inner, max_size=3),
        st.sets(st.integers(), max_size=2),
    ),
    max_leaves=6,
)


def places(content: Any) -> list[tuple[Any, ...]]:
    """Return the path of every value in a content, the whole of it first."""
    items: Any = []
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    return [(), *((key, *rest) for key, inner in items for rest in places(inner))]


def with_value(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return the content with another value at a place."""
    if not path:
        return value
    changed = copy.copy(content)
    changed[path[0]] = with_value(content[path[0]], path[1:], value)
    return changed


def with_key(content: Any, path: tuple[Any, ...], key: Any, value: Any) -> Any:
    """Return the content with one more key in the mapping at a place, if it is one."""
    inner = content
    for step in path:
        inner = inner[step]
    return with_value(content, path, {**inner, key: value}) if isinstance(inner, dict) else content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("declarations")


def read_or_refused(reader: str, folder: Path, text: str) -> None:
    read, _, kind = READERS[reader]
    path = folder / f"{reader}.yaml"
    path.write_text(text, encoding="utf-8")
    line = ""
    try:
        assert isinstance(read(path), kind)
    except FedsiloError as error:
        line = str(error)
    assert len(line.splitlines()) <= 1


@pytest.mark.parametrize("reader", READERS)
def test_what_is_well_formed_is_read(reader: str, folder: Path) -> None:
    read, good, kind = READERS[reader]
    path = folder / "good.yaml"
    path.write_text(yaml.safe_dump(good))
    assert isinstance(read(path), kind)


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused_in_one_line(
    reader: str, folder: Path, data: st.DataObject
) -> None:
    good = READERS[reader][1]
    place = data.draw(st.sampled_from(places(good)))
    value = data.draw(VALUES)
    read_or_refused(reader, folder, yaml.safe_dump(with_value(good, place, value)))


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=75, deadline=None)
@given(data=st.data())
def test_any_key_anywhere_is_read_or_refused_in_one_line(
    reader: str, folder: Path, data: st.DataObject
) -> None:
    good = READERS[reader][1]
    place = data.draw(st.sampled_from(places(good)))
    changed = with_key(good, place, data.draw(SCALARS), data.draw(VALUES))
    read_or_refused(reader, folder, yaml.safe_dump(changed, sort_keys=False))


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=50, deadline=None)
@given(cut=st.integers(0, 400), more=st.text(alphabet="{}[]:-&*!? \n'\"<a1", max_size=6))
def test_a_file_that_was_cut_or_typed_into_is_read_or_refused_in_one_line(
    reader: str, folder: Path, cut: int, more: str
) -> None:
    text = yaml.safe_dump(READERS[reader][1])
    read_or_refused(reader, folder, text[:cut] + more + text[cut + len(more) :])
