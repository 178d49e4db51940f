"""The label of a table as its schema declares it: a class, a number, or the time to an event."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from fedsilo.core.files.declarations import FileModel, Text, fault, number
from fedsilo.core.tasks import SURVIVAL, TASKS
from fedsilo.datasets.silo.declared_silos import ClassLists


class Label(FileModel):
    """The column that is predicted, the last one if there is no header.

    Attributes:
        column: its name.
        task: what is predicted: one of the ``classes``, a number (regression), or the time to an
            event (survival).
        classes: class name -> the values that mean it, in class order; empty for a number. For
            survival they are two: patients who are censored, then patients with the event.
        time: for survival, the column with the time to the event, or to the end of follow-up. It
            comes before ``column`` if there is no header.
        unit: the unit of a number, shown next to its name.
        mean, std: statistics to standardise a number with; both or neither.
    """

    model_config = ConfigDict(title="'label'")

    column: Text
    task: Literal["classification", "regression", "survival"] = "classification"
    classes: ClassLists = Field(default_factory=dict)
    time: Text = ""
    unit: Text = ""
    mean: Annotated[float, number(-1e300, 1e300)] | None = None
    std: Annotated[float, number(1e-12, 1e300)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Label:
        sentence = self._find_fault()
        if sentence:
            raise fault(f"'label' {sentence}")
        return self

    def _find_fault(self) -> str:
        """Describe how the label's keys contradict each other and how to correct them.

        Only the first contradiction is described. Without one, the result is ''. The rules are, in
        this order:

        - The label of a regression has no 'classes'. All other labels have them.
        - Only the label of a regression has 'unit', 'mean' or 'std'.
        - 'mean' and 'std' are both given or both missing.
        - The label of survival has a 'time'. No other label has one.
        - The label of survival has two classes.
        """
        is_number = TASKS[self.task].numeric
        if is_number and self.classes:
            return "has 'classes', but task 'regression' predicts a number: remove one"
        if not is_number and not self.classes:
            return "lacks the key 'classes': name the values of each class"
        if not is_number and (self.unit or self.mean is not None or self.std is not None):
            return (
                "has 'unit', 'mean' or 'std', which only numbers have: remove them, or set its "
                "'task' to 'regression'"
            )
        if (self.mean is None) != (self.std is None):
            return "declares one of 'mean' and 'std': give both or none"
        if (self.task == SURVIVAL) != bool(self.time):
            return (
                "needs a 'time' for task 'survival', and only for that: name the column with the "
                "time to the event, or set another 'task'"
            )
        if self.time and len(self.classes) != 2:
            return (
                f"has {len(self.classes)} 'classes', but task 'survival' has two: first the values "
                "of censored patients, then those of patients with the event"
            )
        return ""

    def columns(self) -> list[str]:
        """Return the names of the label's columns, the time first."""
        return [name for name in (self.time, self.column) if name]

    def names(self) -> tuple[str, ...]:
        """Return the names of the network's outputs.

        For a classification they are the names of its classes. For a regression the only name is
        the label's column, with the unit in brackets if there is one. For survival it is the second
        class, the event.
        """
        if self.time:
            return tuple(self.classes)[1:]
        if not TASKS[self.task].numeric:
            return tuple(self.classes)
        if self.unit:
            return (f"{self.column} ({self.unit})",)
        return (self.column,)
