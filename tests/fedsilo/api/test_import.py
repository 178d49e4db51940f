"""``import fedsilo``: quick, complete, typed, and with the mistakes of a user as one line."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import fedsilo
from fedsilo.api.options import option_of, parameters_of
from fedsilo.api.table import COMMANDS, public_names
from fedsilo.core.versions import FEDSILO

ROOT = Path(__file__).resolve().parents[3]
FUNCTIONS = [name for name in fedsilo.__all__ if name.islower() and name[0] != "_"]


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout.strip()


def test_the_import_alone_loads_nothing() -> None:
    code = "import fedsilo, sys; dir(fedsilo); print([m for m in sys.modules if 'fedsilo' in m])"
    assert _python(code) == "['fedsilo']"


def test_a_function_is_there_before_torch_flower_and_typer_are_loaded() -> None:
    code = (
        "import fedsilo, sys\nfor name in fedsilo.__all__: getattr(fedsilo, name)\n"
        "print({'torch', 'flwr', 'typer', 'pandas', 'matplotlib'} & sys.modules.keys())"
    )
    assert _python(code) == "set()"


def test_every_command_is_a_function_with_its_help_and_no_other_name_is_offered() -> None:
    assert set(fedsilo.__all__) == set(public_names())
    assert set(fedsilo.__all__) <= set(dir(fedsilo))
    assert fedsilo.__version__ == FEDSILO
    commands = [name for panel in COMMANDS.values() for name in panel]
    assert len(FUNCTIONS) == len(commands) + 1  # load_run
    for name in FUNCTIONS:
        assert inspect.getdoc(getattr(fedsilo, name)), name


def test_what_mypy_sees_is_what_is_imported() -> None:
    tree = ast.parse((ROOT / "fedsilo" / "__init__.py").read_text())
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and "TYPE" in ast.unparse(node.test)
    )
    seen: dict[str, str] = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                seen[name.asname or name.name] = f"{node.module}:{name.name}"
    assert seen | {"__version__": public_names()["__version__"]} == public_names()
    assert (ROOT / "fedsilo" / "py.typed").is_file()


def test_no_package_of_fedsilo_has_the_name_of_a_function() -> None:
    """Importing ``fedsilo.compare.tables`` would put a package in the place of the function."""
    rooms = {module.name for module in pkgutil.iter_modules(fedsilo.__path__)}
    assert {"server_app", "datasets"} <= rooms
    assert not rooms & set(fedsilo.__all__)


def test_a_name_that_is_not_there_names_what_to_use() -> None:
    code = "import fedsilo\ntry: fedsilo.datasets\nexcept AttributeError as error: print(error)"
    assert "fedsilo.list_datasets" in _python(code)
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        fedsilo.simulat  # type: ignore[attr-defined]  # noqa: B018


def test_the_old_import_works_and_names_the_new_one() -> None:
    old = importlib.import_module("fedsilo.server_app.api")
    for name, new in {"simulate": "simulate", "datasets": "list_datasets", "Run": "Run"}.items():
        with pytest.warns(DeprecationWarning, match=f"from fedsilo import {new}'"):
            assert getattr(old, name) is getattr(fedsilo, new)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("checking", "deploying", "hospital", "privacy"):
            assert isinstance(getattr(old, name), ModuleType)


def test_every_option_of_a_command_has_help_and_no_parameter_has_it_twice() -> None:
    for name in FUNCTIONS:
        parameters = parameters_of(getattr(fedsilo, name))
        python_only = {key for key, one in parameters.items() if option_of(one.annotation) is None}
        allowed = {"silos", "label", "missing", "network", "tell", "watch"}
        assert name == "load_run" or python_only <= allowed, name


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        ("simulate", {"experiment": 5}, "'experiment' must be a text, but is 5"),
        ("simulate", {"experiment": "x", "engine": "slurm"}, "'engine' must be one of auto, "),
        ("simulate", {"experiment": "x", "seed": "3"}, "'seed' must be a whole number or None"),
        ("simulate", {"experiment": "x", "seed": True}, "but is True"),
        ("compare", {"experiments": ["x"], "paired": "yes"}, "'paired' must be True or False"),
        ("calibrate", {"run_dir": "x", "site": "va", "coverage": "0.9"}, "must be a number"),
        ("report", {"run_dirs": ["x"], "reader": "doctor"}, "'reader' must be one of research"),
        ("predict", {"run_dir": 3.4, "split": "test"}, "expected a run or its directory"),
        ("plot", {"run_dir": None}, "expected a run or its directory"),
        ("load_run", {"path": None}, "expected a run or its directory"),
        ("compare", {"experiments": []}, "name at least one experiment"),
        ("crossvalidate", {"experiments": None}, "name at least one experiment"),
        ("embeddings", {"run_dirs": []}, "name at least one run directory"),
        ("gradcam", {"run_dirs": [], "site": "a", "rows": "0"}, "name at least one run directory"),
        ("embeddings", {"run_dirs": ["x"], "seed": -1}, "--seed must be from 0 to 4294967295"),
        ("deploy_logs", {"lines": "many"}, "'lines' must be a whole number"),
    ],
)
def test_a_mistake_of_the_user_is_one_line(
    function: str, given: Mapping[str, object], said: str
) -> None:
    with pytest.raises(fedsilo.FedsiloError) as error:
        getattr(fedsilo, function)(**given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.code == "setting"


@pytest.mark.parametrize(
    ("function", "given"),
    [
        ("simulate", {"experiment": "nothing", "setings": {"rounds": 1}}),
        ("privacy_plan", {"experiment": "nothing", "samples": [9], "out": "runs"}),
        ("experiments", {"methods": "uefl"}),
    ],
)
def test_an_argument_that_a_function_does_not_have_is_refused(
    function: str, given: Mapping[str, object]
) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{list(given)[-1]}'"):
        getattr(fedsilo, function)(**given)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    with pytest.raises(fedsilo.FedsiloError, match="unknown experiment 'nothing'"):
        fedsilo.simulate("nothing", seed=int(np.int64(3)), out=tmp_path)
    with pytest.raises(fedsilo.FedsiloError, match="unknown experiment 'nothing'"):
        fedsilo.simulate("nothing", seed=np.int64(3), out=tmp_path)  # type: ignore[arg-type]


def test_a_notebook_shows_an_error_as_one_line_without_a_traceback() -> None:
    with pytest.raises(fedsilo.FedsiloError) as error:
        fedsilo.simulate("nothing")
    (line,) = error.value._render_traceback_()  # the hook of IPython
    assert line.startswith("fedsilo: error[setting]: unknown experiment 'nothing'")


def test_in_python_a_function_has_done_its_work_when_it_returns(tmp_path: Path) -> None:
    made = fedsilo.new(tmp_path / "trial")
    assert (tmp_path / "trial" / "simulation.yaml").is_file()
    assert str(tmp_path / "trial" / "simulation.yaml") in made
