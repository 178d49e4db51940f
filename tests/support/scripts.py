"""Scripts and examples that no package has, as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType


def module_of(script: Path) -> ModuleType:
    """Return what the Python file ``script`` defines, run as a module of its name."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
