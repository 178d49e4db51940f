"""The words that a shell offers at the tab key: experiments, methods and settings."""

from collections.abc import Callable

from fedsilo.core.methods import METHODS

VARIABLE = "_FEDSILO_COMPLETE"  # set by the script that --install-completion writes


def complete_experiment(incomplete: str) -> list[str]:
    """List the experiments and methods that begin with ``incomplete``, for tab completion.

    The names are sorted. The methods are the built-in ones, and the experiments are those of the
    default simulation file. If the file cannot be read, no error is raised and only methods are
    listed.
    """
    from fedsilo.core.errors import FedsiloError
    from fedsilo.engines.experiments import open_simulation, simulation_file

    names = list(METHODS)
    try:
        names += open_simulation(simulation_file(None)).cells
    except FedsiloError:
        names = list(METHODS)
    return sorted({name for name in names if name.startswith(incomplete)})


def complete_setting(incomplete: str) -> list[str]:
    """Return the keys of settings that begin with ``incomplete``, sorted, each with a "=" added."""
    from fedsilo.server_app.config.settings import declared_defaults

    return sorted(f"{key}=" for key in declared_defaults() if key.startswith(incomplete))


# Name of a parameter -> the function that completes it
COMPLETIONS: dict[str, Callable[[str], list[str]]] = {
    "experiment": complete_experiment,
    "experiments": complete_experiment,
    "settings": complete_setting,
}
