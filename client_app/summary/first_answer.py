"""The first answer to a survey, kept for good: every later question gets it again.

Two answers would reveal their difference too: of a set of bins moved a little, or of data that
have one patient more, it is that patient. So a data set's first answer stays until the hospital
itself removes it, ``<state-dir>/.own/<site>/survey.json``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.models.contract.settings_schema import Value

FILE = "survey.json"


@dataclass(frozen=True)
class Kept:
    """A first answer.

    Attributes:
        parts: of the answer, as they left or may leave.
        settings: those of the run that decided what was counted, by key.
        fingerprint: of the data.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    parts: Mapping[str, str]
    settings: Mapping[str, Value]
    fingerprint: Mapping[str, str]


def first_answer(folder: Path, dataset: str, make: Callable[[], Kept]) -> tuple[Kept, bool]:
    """Return a data set's first answer, and whether it was made and kept just now.

    Args:
        folder: of what the hospital keeps over all runs.
        dataset: its name.
        make: makes one, where none is kept.

    Raises:
        CheckpointError: what is kept is damaged, or cannot be written.
    """
    file: OwnFile[dict[str, Kept]] = OwnFile(
        folder / FILE,
        dict[str, Kept],
        f"the hospital's own {FILE}",
        "bring it back; if it is removed the next survey gets a new answer",
        "no survey leaves that is not kept; make room or repair the disk",
    )
    with file.locked():
        known = file.read({})
        if dataset in known:
            return known[dataset], False
        made = make()
        file.write({**known, dataset: made})
        return made, True
