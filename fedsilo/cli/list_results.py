"""Shows the lists of methods, settings and experiments: on the terminal, and as JSON.

The commands make lines of text. For JSON the lists are built again from what the lines describe.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedsilo.cli.printing import AsJson, print_json, print_result
from fedsilo.core.arguments import AnyPath, path_of
from fedsilo.core.errors import SettingError


def methods(lines: Iterable[str], *, as_json: AsJson = False) -> None:
    """Print the list of methods, as text or as JSON.

    Each of ``lines`` has the form "name: description". As text, they are printed unchanged. The
    JSON is a list with an object for each line. Its key ``method`` has the name, and ``about`` the
    description.
    """
    if not as_json:
        print_result(lines)
        return
    rows = []
    for text in lines:
        name, _, about = text.partition(": ")
        rows.append({"method": name, "about": about})
    print_json(rows)


def settings(
    lines: Iterable[str], *, word: str = "", pyproject: bool = False, as_json: AsJson = False
) -> None:
    """Print the list of settings, as text or as JSON.

    As text, ``lines`` are printed. As JSON, each setting is a record with the keys ``group``,
    ``key``, ``default`` and ``help``. These are collected here, because ``lines`` are only text.

    Args:
        lines: the lines of the list. They are ignored for JSON.
        word: for JSON, the name of a group, or a text to find in the keys and help of settings.
            Empty for all settings. ``lines`` were already selected by it.
        pyproject: whether ``lines`` are the section of pyproject.toml, which has no JSON form.
        as_json: whether to print JSON.

    Raises:
        SettingError: ``pyproject`` and ``as_json`` are both set. Also raised for JSON if no setting
            has the word.
    """
    if not as_json:
        print_result(lines)
        return
    if pyproject:
        raise SettingError("--pyproject prints TOML: leave out --json")
    from fedsilo.api.listed_settings import find_settings

    rows = []
    for group in find_settings(word):
        for found in group.settings:
            row = {"group": group.name, "key": found.key}
            rows.append({**row, "default": found.default, "help": found.help})
    print_json(rows)


def experiments(
    lines: Iterable[str],
    *,
    experiment: str | None = None,
    method: str | None = None,
    here: bool = False,
    check: bool = False,
    file: AnyPath | None = None,
    as_json: AsJson = False,
) -> None:
    """Print the list of experiments, as text or as JSON.

    As text, ``lines`` are printed. For JSON, ``lines`` are ignored, and the list is read again from
    the simulation file ``file``. It then has the experiments with ``method``, or with data on this
    machine if ``here`` is set. The keys of a record are ``experiment``, ``method``, ``about``,
    ``data``, ``silos``, ``rounds`` and ``cost``. If the experiment cannot run, ``fault`` replaces
    the last four.

    Raises:
        SettingError: ``as_json`` is set together with ``experiment`` or ``check``, whose results
            have no JSON form.
    """
    if not as_json:
        print_result(lines)
        return
    if check or experiment is not None:
        raise SettingError("--json is for the list: leave out --check and the experiment")
    from fedsilo.api.experiment_list import experiment_records
    from fedsilo.engines.experiments import simulation_file

    print_json(experiment_records(simulation_file(path_of(file)), method, here))
