"""Typed notes: what a method's server tells its sites beside arrays, written and read in one place.

A method derives its own class beside its settings; both ends use it, so that neither joins nor
parses a text by hand. On the wire a field is a plain value, or JSON where it is none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Self

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.settings_schema import Value


@dataclasses.dataclass(frozen=True)
class Notes:
    """Nothing is told; a method's notes have fields with defaults where they may be missing."""

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
        """Read them back; a field that did not come has its default.

        Raises:
            SiteError: one has none, or cannot be read; server and site run different versions.
        """
        plain = ("bool", "int", "float", "str")
        try:
            return cls(
                **{
                    field.name: values[field.name]
                    if field.type in plain
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
