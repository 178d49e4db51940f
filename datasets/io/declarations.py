"""Declarations in YAML: read without a doubt, checked by a pydantic model, one line for a fault.

A line names the place by its keys and never quotes a value, which may be a patient's. pydantic
takes a while to import: whoever may do without this module imports it where a file is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from fedsilo.models.contract.errors import FedsiloError, SettingError
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.settings_schema import build, key_of

_DEEPEST = 32  # lists and mappings within one another
_LONGEST = 300  # characters of a name, a path, a sentence; errors quote them
_LARGEST = 1_000_000  # values, each as often as aliases repeat it
_LONGEST_TEXT = 2**19  # characters of a whole text: PyYAML takes seconds for more
_MOST_DIGITS = 300
_LONGEST_KEY = 60  # characters of a key in an error
_UNWRITABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

# libyaml's reads ten times as fast; a PyYAML that was built without it has its own alone
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# PyYAML raises all of these besides its own: of explicit tags, wrong dates, deep nesting
_YAML_FAULTS = (
    *(yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError),
    *(ArithmeticError, RecursionError),
)


class YamlError(ValueError):
    """A text that cannot be read as YAML, or only with a doubt.

    ``detail`` holds PyYAML's own words, which may quote the text.
    """

    def __init__(self, before: str, after: str, detail: str = "") -> None:
        super().__init__(f"{before}it{after}")
        self.before, self.after, self.detail = before, after, detail

    def of(self, file: str) -> str:
        """Return what is wrong with ``file``, without a value of it."""
        return f"{self.before}{file}{self.after}"


def parse_yaml(text: str) -> Any:
    """Return the content of a YAML text; None if it is empty.

    Raises:
        YamlError: it is no YAML, a key stands twice in a mapping (YAML would let the last one
            win), it refers to itself, or it is deeper or larger than any declaration.
    """
    if len(text) > _LONGEST_TEXT:
        raise YamlError("", f" has {len(text)} characters, more than {_LONGEST_TEXT}")
    try:
        _refuse_deep(text)
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check_extent(root, {})
        for node in _mappings(root, set()):
            _check_keys(loader, node)
        _check_texts(root, set())
        return loader.construct_document(root)
    except YamlError:
        raise
    except _YAML_FAULTS as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        detail = " ".join(str(error).split())
    raise YamlError("", f" is no valid YAML{where}", detail)


def _refuse_deep(text: str) -> None:
    """Refuse deep nesting before nodes are made: libyaml's would overflow the stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent) and depth > _DEEPEST:
            raise YamlError("", f" is nested deeper than {_DEEPEST} levels (line {_line(event)})")
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1


def _check_extent(node: yaml.Node, sizes: dict[int, int | None]) -> int:
    """Return how many values are below and in ``node``; ``sizes`` has None for open ones."""
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise YamlError("", f" refers to itself (line {_line(node)})")
        return size
    sizes[id(node)] = None
    total = 1 + sum(_check_extent(child, sizes) for child in _children(node))
    if total > _LARGEST:
        raise YamlError("", f" holds more than {_LARGEST} values")
    sizes[id(node)] = total
    return total


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _mappings(node: yaml.Node, seen: set[int]) -> Iterator[yaml.MappingNode]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        yield node
    for child in _children(node):
        yield from _mappings(child, seen)


def _check_texts(node: yaml.Node, seen: set[int]) -> None:
    """Refuse texts that no name, path or line can hold: control characters, too many of others."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode) and _UNWRITABLE.search(node.value):
        raise YamlError("", f" holds a character that is no text (line {_line(node)})")
    if isinstance(node, yaml.ScalarNode) and len(node.value) > _LONGEST:
        raise YamlError(
            "", f" holds a text of more than {_LONGEST} characters (line {_line(node)}): shorten it"
        )
    for child in _children(node):
        _check_texts(child, seen)


def _check_keys(loader: yaml.SafeLoader, node: yaml.MappingNode) -> None:
    keys = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            continue  # PyYAML refuses it
        plain = key_node.tag in ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")
        key = key_node.value if plain else loader.construct_object(key_node)
        if key in keys:
            raise YamlError(
                f"'{_shown(key_node.value)}' stands in ", f" twice (line {_line(key_node)})"
            )
        keys.add(key)


def _line(node: yaml.Node | yaml.NodeEvent) -> int:
    line: int = node.start_mark.line  # type: ignore[union-attr]  # whatever was read has one
    return line + 1


def _shown(key: Any) -> str:
    """Return a key as it stands in an error: one line, and no longer than a key is."""
    return one_line(key, _LONGEST_KEY)


class Declared(BaseModel):
    """Base of what a file declares: kebab-case keys, no others, and YAML's types as they are.

    ``title`` in a model's config is how errors name it; a field's ``description`` says what its
    value must be.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        hide_input_in_errors=True,
        alias_generator=key_of,
        arbitrary_types_allowed=True,
    )

    def given(self) -> dict[str, Any]:
        """Return the fields that the file names, by their names here."""
        return {name: getattr(self, name) for name in self.model_fields_set}


M = TypeVar("M", bound=Declared)


def fault(sentence: str) -> PydanticCustomError:
    """Build a validator's error that says all: the place too."""
    return PydanticCustomError("fault", "{sentence}", {"sentence": sentence})


def misfit(predicate: str) -> PydanticCustomError:
    """Build a validator's error that says what the value, at the place told before, must be."""
    return PydanticCustomError("misfit", "{sentence}", {"sentence": predicate})


def as_text(value: Any) -> str:
    """Return a scalar as text, unless YAML made something else of it.

    Raises:
        PydanticCustomError: it did.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float | date):
        raise misfit(
            "must be a text or a number; of words such as yes, no and null YAML makes something "
            "else: write it in quotes"
        )
    if isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS:
        raise misfit(f"must have at most {_MOST_DIGITS} digits")
    text = str(value)
    if not text.isprintable() and text != "\t":  # which parts the columns of a table
        raise misfit("must be one line of characters that can be printed")
    return text


Text = Annotated[str, BeforeValidator(as_text)]


def number(least: float, most: float) -> Any:
    """Return the bounds of a number, as a field of ``Annotated[float, ...]``."""
    told = f"a number from {least} to {most}"
    return Field(ge=least, le=most, allow_inf_nan=False, description=told)


def whole(least: int, most: int, told: str = "") -> Any:
    """Return the bounds of a whole number, as a field of ``Annotated[int, ...]``.

    ``told`` says ``most`` in words.
    """
    return Field(ge=least, le=most, description=f"a whole number from {least} to {told or most}")


def settings_model(cls: type, **more: Any) -> type[Declared]:
    """Return the model of a settings dataclass: its keys under their own rules, and ``more``.

    Fields of the dataclass that have no rule are left out.
    """
    fields: dict[str, Any] = {
        field.name: (
            Annotated[Any, BeforeValidator(partial(_ruled, cls, key_of(field.name)))],
            field.default,
        )
        for field in dataclasses.fields(cls)
        if "rule" in field.metadata
    }
    model: type[Declared] = create_model(cls.__name__, __base__=Declared, **fields, **more)
    return model


def _ruled(cls: type, key: str, value: Any) -> Any:
    if isinstance(value, list | dict | set | tuple | bytes):
        raise fault(f"setting '{key}' must be one value, no list and no mapping")
    try:
        return getattr(build(cls, {key: value}), key.replace("-", "_"))
    except SettingError as error:
        raise fault(str(error)) from None


@dataclass(frozen=True)
class Fault:
    """The first fault of a content.

    Attributes:
        kind: 'unknown' or 'missing' of a key; 'shape' where it is no mapping, list or text; or
            'value'.
        key: that key.
        keys: what stands in its place, or may.
        sentence: all of it in words.
    """

    kind: str
    key: str
    keys: tuple[str, ...]
    sentence: str


def checked(model: type[M], content: Any, refuse: Callable[[Fault], FedsiloError]) -> M:
    """Return the content as ``model``.

    Raises:
        FedsiloError: what ``refuse`` makes of the first fault, as one line.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        refusal = refuse(_first_fault(model, error))
    raise type(refusal)(" ".join(str(refusal).split()))


def _first_fault(model: type[Declared], invalid: ValidationError) -> Fault:
    """Return a misspelt key first, and last a missing one, which it may be."""
    rank = {"extra_forbidden": 0, "invalid_key": 0, "missing": 2}
    errors = invalid.errors(include_url=False, include_input=False)
    return _fault_of(model, min(errors, key=lambda error: rank.get(error["type"], 1)))


def _fault_of(model: type[Declared], error: ErrorDetails) -> Fault:
    path, kind = error["loc"], error["type"]
    # Of a key that is too many or too few, the path's last step is the key: its mapping is at fault
    of_key = kind in ("extra_forbidden", "invalid_key", "missing")
    spot = _spot(model, path[:-1] if of_key else path)
    keys = tuple(str(field.alias) for field in spot.owner.model_fields.values())
    title, key = spot.owner.model_config.get("title", "it"), _shown(path[-1]) if path else ""
    if of_key and kind != "missing":
        near = difflib.get_close_matches(key, keys, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; allowed: {', '.join(keys)}"
        return Fault("unknown", key, keys, f"{title} has the unknown key '{key}'{hint}")
    if kind == "missing":
        return Fault("missing", key, keys, f"{title} lacks the key '{key}'")
    if kind == "model_type":
        told = f"{title} must be a mapping with the keys {', '.join(keys)}"
        return Fault("shape", key, keys, told)
    sentence = str(error.get("ctx", {}).get("sentence", ""))
    if kind != "fault":
        sentence = f"{_place(path)} {sentence or _must(spot.field, error)}"
    return Fault("shape" if kind in _KINDS else "value", key, keys, sentence)


_KINDS = {
    "list_type": "a list",
    "dict_type": "a mapping",
    "bool_type": "true or false",
    "string_type": "a text",
}


def _must(field: FieldInfo | None, error: ErrorDetails) -> str:
    """Say what the value of a field must be."""
    if error["type"] == "literal_error":
        return f"must be {error['ctx']['expected']}"
    if field is not None and field.description:
        return f"must be {field.description}"
    return f"must be {_KINDS.get(error['type'], 'of another kind')}"


def _place(path: tuple[int | str, ...]) -> str:
    """Return a place in words: "'columns', item 2, 'mean'"."""
    steps = [step for step in path if step != "[key]"]
    return ", ".join(
        f"item {step + 1}" if isinstance(step, int) else f"'{_shown(step)}'" for step in steps
    )


@dataclass(frozen=True)
class _Spot:
    """Where a path leads: the innermost model on it, and that model's field on it."""

    owner: type[BaseModel]
    field: FieldInfo | None


def _spot(model: type[Declared], path: tuple[int | str, ...]) -> _Spot:
    owner: type[BaseModel] = model
    field: FieldInfo | None = None
    here: Any = model
    for step in path:
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = next((f for f in here.model_fields.values() if f.alias == step), None)
            here = field.annotation if field else None
        else:
            here = _item_type(here)
        if isinstance(here, type) and issubclass(here, BaseModel):
            owner, field = here, None
    return _Spot(owner, field)


def _item_type(kind: Any) -> Any:
    """Return the type of a list's items or of a mapping's values."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    inner = get_args(kind)[-1] if get_args(kind) else None
    return get_args(inner)[0] if get_origin(inner) is Annotated else inner


def distinct_texts(names: Mapping[Any, Any]) -> bool:
    """Tell whether a mapping's keys are different ones as texts too: 1 and '1' are not."""
    return len({str(name) for name in names}) == len(names)
