"""What is added to a run at its end: the papers' numbers in its summary, and its pictures."""

from typing import Any

from fedsilo.server_app.config.settings import read_run_config
from fedsilo.server_app.records.run_directory import CONFIG, SILOS, RunDirectory
from fedsilo.server_app.studies.figures.learning_curves import draw_run
from fedsilo.server_app.studies.published.numbers import published_numbers


def finish_run(directory: RunDirectory, summary: dict[str, Any]) -> None:
    """Add the papers' numbers to a summary that is still to be written, and draw the pictures."""
    add_published(directory, summary)
    list(draw_run(directory, summary))


def add_published(directory: RunDirectory, summary: dict[str, Any]) -> None:
    """Add ``published`` and ``published-unlike`` to a summary, None where there are none."""
    settings = read_run_config(directory.path / CONFIG).settings
    found = published_numbers(settings, directory.read_json(SILOS))
    summary["published"] = found.numbers or None
    summary["published-unlike"] = found.unlike or None
