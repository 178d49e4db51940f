"""Typed notes: what a method's server sends its sites beside arrays.

A method derives its own class beside its settings, and both ends use it. On the wire a field is a
plain value, or JSON.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Self

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.settings_schema import Value


@dataclasses.dataclass(frozen=True)
class Notes:
    """No notes; a method's own class has a field for each, with a default if it may be missing."""

    def to_values(self) -> dict[str, Value]:
        """Return the notes as ``Instruction.notes`` carries them."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: value
            if isinstance(value, bool | int | float | str)
            else json.dumps(value, sort_keys=True)
            for name, value in named.items()
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> Self:
        """Read them back; a field that is missing has its default.

        Raises:
            SiteError: it has none, or one cannot be read; server and site run different versions.
        """
        plain = ("bool", "int", "float", "str")
        try:
            return cls(
                **{
                    field.name: values[field.name]
                    if getattr(field.type, "__name__", field.type) in plain  # a class, or its name
                    else json.loads(str(values[field.name]))
                    for field in dataclasses.fields(cls)
                    if field.name in values
                }
            )
        except (TypeError, ValueError) as error:
            raise SiteError(
                f"a message's notes cannot be read ({type(error).__name__}): server and site run "
                "different versions of fedsilo"
            ) from None
