"""The declaration of the user's own images: sites, the task and its labels, size and test share.

docs/images.md describes its keys. Files of other image data sets, such as ``mammography.yaml``,
extend it.
"""

import os
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from fedsilo.core.files.declarations import FileModel, Text, as_text, fault, whole
from fedsilo.core.files.declarations import number as number_between
from fedsilo.core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, SURVIVAL
from fedsilo.datasets.images.image_data_set import SMALLEST_IMAGE, Classes
from fedsilo.datasets.silo.declared_silos import ClassLists, Sites

LARGEST_IMAGE = 4096
_RESERVED = frozenset({"path", "label", "split", "patient"})  # columns that are no findings
# Task -> the key that names what its labels are
_NAMED_BY = {
    CLASSIFICATION: "classes",
    MULTI_LABEL: "findings",
    REGRESSION: "outcome",
    SURVIVAL: "event",
}


def resolve_inside(folder: str, path: str) -> str | None:
    """Join a folder and a path in it, or return None if the result is outside the data directory.

    Each '..' in ``path`` is resolved. ``folder`` and the result are relative to the data directory.
    Only the text is used: symbolic links are not followed, and the file need not exist.
    """
    # normpath removes '..', so only a path that leads outside still begins with '..'. It keeps two
    # slashes at the beginning, which pathlib takes for another root than one slash
    joined = os.path.normpath(PurePosixPath(folder) / path)
    if joined.startswith("/") or PurePosixPath(joined).parts[:1] == ("..",):
        return None
    return joined


def stored_name(folder: Path, name: str) -> str:
    """Return a file's name in the Unicode form (NFC or NFD) under which the file exists.

    The given form is tried first, then NFC, then NFD. If no such file exists, the name is returned
    unchanged.

    Args:
        folder: the folder that ``name`` is relative to.
        name: the file's name or relative path. A form applies to the whole path.
    """
    # A Mac stores an umlaut as two characters (NFD), which most programs write as one (NFC)
    if (folder / name).exists():
        return name
    for form in ("NFC", "NFD"):
        stored = unicodedata.normalize(form, name)
        if (folder / stored).exists():
            return stored
    return name


def label_columns(task: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the columns of a manifest (a site's list of images) that contain the labels.

    - For survival they are 'time' and 'event'.
    - For the multi-label task they are the findings, ``names``.
    - For any other task the only column is 'label'.

    Args:
        task: the task's name.
        names: the names of the findings. Only the multi-label task uses them.
    """
    if task == MULTI_LABEL:
        return tuple(names)
    if task == SURVIVAL:
        return ("time", "event")
    return ("label",)


def _names_as_lists(content: Any) -> Any:
    """Convert a list of class names to a mapping: class -> a list with the class's name only.

    Manifests then use the classes' names as labels. Anything but a list is returned unchanged.

    Raises:
        ValueError: a name appears twice in the list.
    """
    if not isinstance(content, list):
        return content
    return {name: [name] for name in distinct_names(content)}


def distinct_names(content: Sequence[Any]) -> list[str]:
    """Convert the entries of a list of class names to strings, and check that none appears twice.

    Raises:
        ValueError: two entries give the same string, such as 1 and '1'.
    """
    names = [as_text(name) for name in content]
    if len(set(names)) != len(names):
        raise fault("under 'classes' a name appears twice")
    return names


class Declaration(FileModel):
    """The content of a declaration file.

    Attributes:
        sites: site -> its manifest, relative to the data directory.
        task: what the labels are: classes, a number, several findings, or the time to an event.
        classes: class name -> the labels in manifests that mean this class, in class order; empty
            for other tasks.
        findings: the findings, each a column of 0 and 1 in the manifests; empty for other tasks.
        outcome: a name for the number in the column 'label', of task regression.
        event: a name for the event, of task survival; manifests have columns 'time' and 'event'.
        unit: the unit of that number.
        mean, std: statistics to standardise that number with; both or neither.
        image_size: side of an image in pixels, unless the settings name one.
        test_share: share of test images if neither the manifest nor the settings give a split.
    """

    model_config = ConfigDict(title="the file")

    sites: Sites
    task: Literal["classification", "regression", "multi-label", "survival"] = CLASSIFICATION
    classes: Annotated[ClassLists, BeforeValidator(_names_as_lists)] = Field(default_factory=dict)
    findings: list[Text] = Field(default_factory=list)
    outcome: Text = ""
    event: Text = ""
    unit: Text = ""
    mean: Annotated[float, number_between(-1e300, 1e300)] | None = None
    std: Annotated[float, number_between(1e-12, 1e300)] | None = None
    image_size: Annotated[int, whole(SMALLEST_IMAGE, LARGEST_IMAGE)] = 224
    test_share: Annotated[float, number_between(0.0, 0.9)] = 0.25

    @model_validator(mode="after")
    def _consistent(self) -> "Declaration":
        for task, key in _NAMED_BY.items():
            is_given = bool(getattr(self, key))
            if is_given and task != self.task:
                raise fault(f"'{key}' belongs to 'task: {task}', but the task is '{self.task}'")
            if not is_given and task == self.task:
                raise fault(f"the file lacks the key '{key}', which 'task: {task}' needs")
        if len(set(self.findings)) < len(self.findings) or set(self.findings) & _RESERVED:
            raise fault(
                "under 'findings' a name appears twice, or is the name of another column of "
                f"manifests ({', '.join(sorted(_RESERVED))}): rename it"
            )
        has_number = self.unit or self.mean is not None or self.std is not None
        if has_number and self.task != REGRESSION:
            raise fault("'unit', 'mean' and 'std' belong to 'task: regression': remove them")
        if (self.mean is None) != (self.std is None):
            raise fault("the file declares one of 'mean' and 'std': give both or none")
        return self

    def labels(self) -> Classes:
        """Return the predicted quantities: name -> the labels that mean it in manifests.

        A manifest is a site's list of images. Only classes have such labels. For other tasks the
        labels are an empty tuple, and the names are:

        - the findings, if there are several,
        - the outcome, with its unit in brackets if it has one, for a numeric outcome,
        - the event, for survival.
        """
        if self.outcome and self.unit:
            return {f"{self.outcome} ({self.unit})": ()}
        if self.outcome or self.event:
            return {self.outcome or self.event: ()}
        if self.findings:
            return dict.fromkeys(self.findings, ())
        return self.classes
