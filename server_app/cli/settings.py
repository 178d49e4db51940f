"""``settings`` and ``experiments``: what can be run, and with which settings."""

from __future__ import annotations

from typing import Annotated

import typer

from fedsilo.server_app.cli.options import DATA, FileOption, example


def add_commands(app: typer.Typer) -> None:
    """Add ``settings`` and ``experiments``."""
    app.command(
        "settings",
        help="list every setting, its default and range",
        epilog=example("settings"),
        rich_help_panel=DATA,
    )(_settings)
    app.command(
        "experiments",
        help="list the experiments",
        epilog=example("experiments"),
        rich_help_panel=DATA,
    )(_experiments)


def _settings(
    *,
    pyproject: Annotated[
        bool, typer.Option("--pyproject", help="as the run-config section of pyproject.toml")
    ] = False,
) -> None:
    from fedsilo.models.contract.settings import CommonSettings
    from fedsilo.server_app.config.settings import grouped, known_defaults

    if pyproject:
        import tomli_w

        print(
            tomli_w.dumps({"tool": {"flwr": {"app": {"config": grouped(known_defaults())}}}}),
            end="",
        )
        return
    from fedsilo.models.contract.methods import METHODS, settings_class

    _list_settings("every method", CommonSettings)
    for method in METHODS:
        _list_settings(f"method {method}", settings_class(method))


def _list_settings(title: str, cls: type) -> None:
    from fedsilo.models.contract.settings_schema import defaults, rule_of

    print(f"# {title}")
    for key, default in defaults(cls).items():
        rule = rule_of(cls, key)
        allowed = f"; {rule.allowed()}" if rule.allowed() else ""
        print(f"{key} = {default!r}  ({rule.help}{allowed})")


def _experiments(*, file: FileOption = None) -> None:
    from fedsilo.datasets.registry import silo_count
    from fedsilo.server_app.config.experiments import read_experiments, simulation_file
    from fedsilo.server_app.config.settings import resolve

    for name, experiment in read_experiments(simulation_file(file)).items():
        settings = resolve(experiment.values)
        print(
            f"{name}: {settings.common.method} on {settings.common.dataset}, "
            f"{silo_count(settings.common) or 'own'} silos, {settings.common.rounds} rounds"
        )
