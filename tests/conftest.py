"""Fixtures shared by all tests: a cache per session, small settings, and inline runs."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import pytest

from fedsilo.core.methods import settings_class
from fedsilo.core.settings_schema import Value, key_of, keys_of
from fedsilo.pictures import picture_files
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.kernels import KERNELS
from tests.support.setting_keys import as_key, as_keys
from tests.support.tiny import TINY, TINY_METHOD

# Without a deadline: speed belongs in a benchmark, not in a test that fails on a busy machine.
# `make test` draws the same cases each time, so that a red suite is the fault of the change;
# `make test-drawn` draws new ones
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("drawn", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# The recorded bits are those of these kernels; whoever names others, as `make test-kernels` does,
# tests by those
if not KERNELS.keys() & os.environ.keys():
    os.environ |= KERNELS

# To write a file anew waits for the disk, milliseconds each, and runs do it thousands of times
_MEMORY = Path("/dev/shm")
_ROOM = 8 * 2**30  # bytes; pytest keeps the folders of its last three runs

# The longest files of `make test`, longest first: begun last, one would be all that is left to do
_LONG = (
    *("tests/deploy/test_small.py", "tests/test_ray.py", "tests/test_end_to_end.py"),
    *("tests/reference/test_references.py", "attacks/test_trust_levels.py"),
    *("docs/test_commands.py", "fuzz/test_replies.py", "packaging/test_wheel.py"),
    *("attacks/test_names_that_end_runs.py", "export/test_export.py", "docs/test_site.py"),
    *("attacks/test_packed_files.py", "cli/test_main.py", "records/test_tracking.py"),
    *("comparison/test_over_seeds.py", "docs/test_notebooks.py", "docs/test_python_snippets.py"),
    *("tests/test_secure_end_to_end.py", "engines/test_process_engine.py", "api/test_api.py"),
    *("watch/test_serve.py", "docs/test_architecture.py", "tests/test_tables_end_to_end.py"),
    *("reports/test_report.py", "reports/test_in_a_browser.py", "tests/test_privacy_end_to_end.py"),
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without Python's garbage collector, then set all objects apart from it.

    Modules and tests stay until the end. To look through these millions of objects for garbage
    takes half of the time of collecting, and slows every test afterwards.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _join_loggers("torch")
        gc.enable()
        gc.freeze()


def _join_loggers(name: str) -> None:
    """Let all loggers below ``name`` pass their lines to that one, and drop their own handlers.

    For each test pytest puts its handlers into every logger that keeps its lines to itself, six
    times. PyTorch has fifty of these, which took half a millisecond of each test.
    """
    for below, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and below.startswith(f"{name}."):
            logger.propagate = True
            logger.handlers.clear()


def pytest_configure(config: pytest.Config) -> None:
    """Put the tests' folders into memory, and give frozen objects back to the collector at the end.

    Libraries expect them there at the exit. What is cleaned up is in reverse order, so this comes
    after pytest's own search for errors in garbage, which would look through all of them.
    """
    config.add_cleanup(gc.unfreeze)
    if _holds_folders(_MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def _holds_folders(place: Path) -> bool:
    """Return whether tests can have their folders there: with room, and programs can be run."""
    if not os.access(place, os.W_OK):
        return False
    about = os.statvfs(place)
    return about.f_bavail * about.f_frsize >= _ROOM and not about.f_flag & os.ST_NOEXEC


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and keep each file's own order."""
    places = {path: _place(path.as_posix()) for path in {item.path for item in items}}
    items.sort(key=lambda item: places[item.path])


def _place(path: str) -> int:
    """Return a file's place among the longest, the last place for all others."""
    matches = (place for place, name in enumerate(_LONG) if path.endswith(f"/{name}"))
    return next(matches, len(_LONG))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep decoded data of the tests out of the user's cache, and digests out of his home."""
    os.environ["FEDSILO_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["FEDSILO_TRUSTED_PLUGINS"] = str(tmp_path_factory.mktemp("home") / "trusted")
    os.environ.pop("FEDSILO_RUNS", None)


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """Leave it to the system when files reach the disk: no test takes the power away.

    Runs and audit logs wait for the disk thousands of times, milliseconds each.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _whole_fonts() -> Iterator[None]:
    """Leave fonts as they are in PDF files: to cut them takes as long as to draw the picture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(picture_files._OPTIONS, "pdf.fonttype", 3)
        yield


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Give every test the same numbers from torch's own generator, each time and in any order.

    No sessions of earlier tests are left either: until they hold 256 MiB, all would be kept.
    """
    import torch  # not above: the process that deals out the tests does without

    torch.default_generator.manual_seed(0)
    session = sys.modules.get("fedsilo.client_app.session")
    if session is not None:
        session._sessions.clear()


@pytest.fixture(scope="session")
def tiny() -> Callable[..., dict[str, Value]]:
    """Return a builder of small run settings for a method, with changes."""

    def build(method: str, **changes: Value) -> dict[str, Value]:
        own = keys_of(settings_class(method)).items()
        grouped = {key_of(name): key for name, key in own}  # a keyword has no group
        named = {grouped.get(key_of(name), as_key(name)): changes[name] for name in changes}
        return TINY | {"method": method} | TINY_METHOD.get(method, {}) | named

    return build


InlineRun = Callable[..., RunDirectory]


@pytest.fixture
def inline_run(tmp_path: Path) -> InlineRun:
    """Return a function that runs settings with the inline engine under ``tmp_path``."""
    from fedsilo.engines.inline_engine import run_inline
    from fedsilo.pictures.learning_curves import draw_run

    def run(
        values: Mapping[str, Value], nodes: int = 3, out: Path = tmp_path, draw: bool = False
    ) -> RunDirectory:
        named = as_keys({"run.name": "run", "run.out": str(out)} | dict(values))
        directory = run_inline(resolve(named), nodes)
        if draw:
            list(draw_run(directory))
        return directory

    return run


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a command's runs in this process: another one takes seconds to import everything.

    One after another: Flower keeps a process's run id in one place.
    """
    from fedsilo.comparison import jobs, trials
    from fedsilo.pictures import learning_curves

    for module in (jobs, trials):
        monkeypatch.setattr(module, "make_pool", lambda *_, **__: ThreadPoolExecutor(1))
    for module in (jobs, learning_curves):  # jobs has its name from before
        monkeypatch.setattr(module, "draw_pictures", lambda *_: None)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real data files, or skip: they are no part of the repository."""
    given = os.environ.get("FEDSILO_TEST_DATA", "")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "mnist").is_dir():
        pytest.skip(f"no real data in {folder}; name a folder by FEDSILO_TEST_DATA")
    return folder
