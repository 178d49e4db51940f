"""The declaration of images in YAML, as models. Imported when a file is read."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, model_validator

from fedsilo.datasets.images.dataset import SMALLEST_IMAGE
from fedsilo.datasets.io.declarations import FileModel, as_text, fault, number, whole
from fedsilo.datasets.silo.declared_silos import ClassLists, Sites, one_class_each

_LARGEST_IMAGE = 4096


def _names_as_lists(content: Any) -> Any:
    """Return the mapping that a list of classes stands for: they are their own labels."""
    if not isinstance(content, list):
        return content
    names = [as_text(name) for name in content]
    if len(set(names)) != len(names):
        raise fault("under 'classes' a name stands twice")
    return {name: [name] for name in names}


class ImagesModel(FileModel):
    """What every site's images are, as the file has it; ``given`` has what it says."""

    model_config = ConfigDict(title="the file")

    sites: Sites
    classes: Annotated[ClassLists, BeforeValidator(_names_as_lists)]
    image_size: Annotated[int, whole(SMALLEST_IMAGE, _LARGEST_IMAGE)] = SMALLEST_IMAGE
    test_share: Annotated[float, number(0.0, 0.9)] = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> ImagesModel:
        one_class_each(self.classes)
        return self


class DeepImagesModel(ImagesModel):
    """The same of images that may have more than 8 bits a pixel."""

    bits: Annotated[int, whole(8, 16)] = 8
