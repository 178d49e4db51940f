"""Checks the content of declaration files by pydantic models.

An error is one line that names the place of the fault by its keys. By default it does not quote the
value there, which may be a patient's. pydantic takes 75 ms to import, so modules with models are
imported only when a file is read.
"""

import difflib
import unicodedata
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from fedsilo.core.errors import FedsiloError
from fedsilo.core.one_line import one_line, quote_value
from fedsilo.core.settings_schema import key_of

_MOST_DIGITS = 300
_LONGEST_KEY = 60  # characters of a key in an error


class FileModel(BaseModel):
    """Base of models for files: kebab-case keys, no unknown keys, and YAML's types unchanged.

    An error refers to a model by the ``title`` in its config. If a model has no title, the error
    names its place in the file.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        hide_input_in_errors=True,
        alias_generator=key_of,
        arbitrary_types_allowed=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, content: Any) -> Any:
        """Check the keys of a file's content, before pydantic checks the values.

        The content is returned unchanged. Keys are compared with the fields' aliases. An optional
        key may be missing.

        Raises:
            PydanticCustomError: the content is not a mapping, or a key is unknown or missing.
        """
        predicate = cls._find_key_fault(content)
        if not predicate:
            return content
        title = cls.model_config.get("title")
        if title:
            raise fault(f"{title} {predicate}")
        raise misfit(predicate)

    @classmethod
    def _find_key_fault(cls, content: Any) -> str | None:
        """Describe the first unknown or missing key in a file's content; None if there is none.

        The description continues a sentence about the content, as in "lacks the key 'mean'".
        Unknown keys come before missing ones. For an unknown key, the most similar known key is
        suggested. Content that is not a mapping is a fault too.
        """
        is_required = {}
        for field in cls.model_fields.values():
            is_required[str(field.alias)] = field.is_required()
        if not isinstance(content, dict):
            return f"must be a mapping with the keys {', '.join(is_required)}"
        for key in content:
            if key not in is_required:
                # A misspelt key is likelier than an invented one, so the nearest known key is named
                hint = f"allowed: {', '.join(is_required)}"
                near = difflib.get_close_matches(str(key), is_required, n=1)
                if near:
                    hint = f"did you mean '{near[0]}'?"
                return f"has the unknown key '{one_line(key, _LONGEST_KEY)}'; {hint}"
        for key, required in is_required.items():
            if required and key not in content:
                return f"lacks the key '{key}'"
        return None

    def stated_fields(self) -> dict[str, Any]:
        """Return field name -> value for the fields that the file sets, without defaults."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def fault(sentence: str) -> PydanticCustomError:
    """Build a validator's error from a complete sentence, which is shown unchanged."""
    return PydanticCustomError("fault", "{sentence}", {"sentence": sentence})


def misfit(predicate: str) -> PydanticCustomError:
    """Build a validator's error from a predicate, whose subject is the place of the value."""
    return PydanticCustomError("misfit", "{sentence}", {"sentence": predicate})


def within(sentence: str) -> PydanticCustomError:
    """Build a validator's error from a sentence, which follows the value's place and a colon."""
    return PydanticCustomError("within", "{sentence}", {"sentence": sentence})


def check_content(
    kind: Any, content: Any, refuse: Callable[[str], FedsiloError], quoted: bool = False
) -> Any:
    """Check the content of a YAML file by pydantic, and convert it to the type ``kind``.

    Args:
        kind: a ``FileModel``, which is a pydantic model of a file, or another type that pydantic
            can check.
        content: the content, as parsed from YAML.
        refuse: builds the error. It gets one sentence, which describes the first fault and does not
            name the file.
        quoted: whether the sentence may quote the wrong value. This must be False if the value may
            come from a patient's record.

    Returns:
        The content as an instance of ``kind``.

    Raises:
        FedsiloError: the content does not fit ``kind``. ``refuse`` built this error.
    """
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        sentence = _build_sentence(error.errors(include_url=False)[0], quoted)
    raise refuse(sentence)


_WORDS = {
    "missing": "is missing",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
}


def _build_sentence(error: ErrorDetails, quoted: bool) -> str:
    """Build a sentence from one of pydantic's errors: the place of the wrong value, then the fault.

    If the whole content is wrong, the place is called "it". Two types of errors from fedsilo's
    validators bring a whole sentence. For the type "fault", that sentence is the result. For the
    type "within", it follows the place and a colon.

    Args:
        error: the error, from pydantic or from one of fedsilo's validators.
        quoted: whether the wrong value follows the place, as in "'mean' is 'x': it must be a
            number". A value that is a mapping is never quoted.
    """
    said = str(error.get("ctx", {}).get("sentence", ""))
    if error["type"] == "fault":
        return said
    usual = error["msg"].replace("Input should be", "must be").replace("a valid", "a")
    place = place_of(error["loc"]) or "it"
    # A mapping would be long and say little
    if quoted and not isinstance(error["input"], dict):
        place += f" is {quote_value(error['input'])}: it"
    if error["type"] == "within":
        place += ":"
    return f"{place} {said or _WORDS.get(error['type'], usual)}"


def place_of(path: tuple[int | str, ...]) -> str:
    """Describe the place of a value in nested content in words, as in "'columns', item 2, 'mean'".

    List positions count from 1 in the words, but from 0 in ``path``. Keys are quoted, and cut to 60
    characters with a '…'. An empty path gives an empty string.

    If pydantic ends the path with "[key]", the key before it is wrong, and not the value. The
    "[key]" is then left out, and the last key is quoted even if it is a number.
    """
    steps = list(path)
    if path[-1:] == ("[key]",):
        # pydantic marks a wrong key by "[key]" after it. The key may be a number
        steps = [*path[:-2], str(path[-2])]
    words = []
    for step in steps:
        if isinstance(step, int):
            words.append(f"item {step + 1}")
        else:
            words.append(f"'{one_line(step, _LONGEST_KEY)}'")
    return ", ".join(words)


def as_text(value: Any) -> str:
    """Convert a value from a YAML file to a string, even if YAML read it as a number or date.

    The string is in the Unicode form NFC. pydantic calls this function for fields of the type
    ``Text``.

    Raises:
        PydanticCustomError: the value has another type, such as the bool that YAML makes of 'yes'.
            The error is also raised for a whole number of more than 300 digits, and for a string
            with an unprintable character, such as a line end. Only the string of a single tab is
            allowed.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float | date):
        raise misfit(
            "must be a text or a number; YAML reads words such as yes, no and null as something "
            "else: write it in quotes"
        )
    if isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS:
        raise misfit(f"must have at most {_MOST_DIGITS} digits")
    text = str(value)
    # A single tab is allowed, because it may be the delimiter of a table
    if not text.isprintable() and text != "\t":
        raise misfit("must be one line of characters that can be printed")
    # Columns, levels and labels are compared in this form wherever they are read
    return unicodedata.normalize("NFC", text)


Text = Annotated[str, BeforeValidator(as_text)]


def number(least: float, most: float) -> BeforeValidator:
    """Build a validator for an int or float from ``least`` to ``most``, both included."""
    return _build_range_check(least, most, f"a number from {least} to {most}", (int, float))


def whole(least: int, most: int, in_words: str = "") -> BeforeValidator:
    """Build a validator for a whole number from ``least`` to ``most``, both included.

    True, False, and floats such as 3.0 are refused. If ``in_words`` is not empty, the error has
    these words in place of ``most``, after "from ... to".
    """
    return _build_range_check(
        least, most, f"a whole number from {least} to {in_words or most}", (int,)
    )


def _build_range_check(
    least: float, most: float, wanted: str, types: tuple[type, ...]
) -> BeforeValidator:
    """Build a validator for a value from ``least`` to ``most``, both included, of certain types.

    The value's type must be one of ``types`` itself, not a subclass. Therefore True does not count
    as an int, and an int is not accepted for a float. In the error, ``wanted`` follows "must be"
    and describes the allowed values.
    """

    def check(value: Any) -> Any:
        # isinstance would accept True as the number 1
        if type(value) in types and least <= value <= most:
            return value
        raise misfit(f"must be {wanted}")

    return BeforeValidator(check)
