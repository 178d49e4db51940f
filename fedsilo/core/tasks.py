"""The table of tasks: what a network learns, from a class of an image to a number of a patient.

Each entry names a class of ``models/tasks``, which has everything that differs between tasks: the
loss, the form of a label, the metrics and what a report shows. A class is imported when it is first
used, so a list of tasks needs no PyTorch.
"""

from typing import NamedTuple


class TaskEntry(NamedTuple):
    """One line of the table of tasks."""

    place: str  # ``module:Class``, a subclass of ``fedsilo.models.tasks.task.Task``
    description: str  # one sentence for lists of tasks
    # The number of groups whose samples a site counts, and that are spread evenly over splits; 0
    # for one group per output of the network, as with classes
    strata: int


CLASSIFICATION = "classification"
SURVIVAL = "survival"
TASKS = {
    CLASSIFICATION: TaskEntry(
        "fedsilo.models.tasks.classification:Classification",
        "One of several classes for each patient or image.",
        strata=0,
    ),
    SURVIVAL: TaskEntry(
        "fedsilo.models.tasks.survival:Survival",
        "The time to an event, of patients of whom some are censored (Cox).",
        strata=2,
    ),
}


def count_strata(task: str, outputs: int) -> int:
    """Return the number of groups in which a site counts its samples.

    Args:
        task: a name in ``TASKS``; KeyError for any other.
        outputs: the number of outputs of the network.
    """
    return TASKS[task].strata or outputs
