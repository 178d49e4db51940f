"""Chooses the site at which a finished run's model is opened, for ``FinishedRun.model``."""

from collections.abc import Callable, Iterable

from fedsilo.core.errors import DataError
from fedsilo.runs.trained_model import TrainedModel


def open_at_first_site(
    sites: Iterable[str], open_at: Callable[[str], TrainedModel]
) -> TrainedModel:
    """Open the model at the first site whose data are on this machine.

    Args:
        sites: the sites of the run, of which there is one or more.
        open_at: opens the model with the data of a site.

    Raises:
        DataError: no site's data are here; it is the first site's error.
    """
    errors: list[DataError] = []
    for site in sites:
        try:
            return open_at(site)
        except DataError as error:
            errors.append(error)
    raise errors[0]
