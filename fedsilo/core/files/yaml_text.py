"""Reads YAML without ambiguity. A text that is refused gives a one-line error that quotes no value.

PyYAML by itself silently takes the last of two equal keys, and needs seconds or all memory for some
texts.
"""

import re
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from fedsilo.core.errors import FedsiloError, SettingError
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.one_line import one_line, quote_value

_DEEPEST = 32  # lists and mappings within one another
_LONGEST = 300  # characters of a name, a path, a sentence; errors quote them
_LARGEST = 1_000_000  # values, each as often as aliases repeat it
_LONGEST_TEXT = 2**19  # characters of a whole text: PyYAML takes seconds for more
_LONGEST_KEY = 60  # characters of a key in an error
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_UNWRITABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

# libyaml's loader is ten times as fast, but PyYAML may be built without it
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# PyYAML raises all of these for explicit tags, wrong dates and deep nesting
_YAML_FAULTS = (
    *(yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError),
    *(ArithmeticError, RecursionError),
)


class YamlError(ValueError):
    """A text is not valid YAML, or is ambiguous.

    The message is a predicate or a sentence. ``detail`` is PyYAML's own message, which may quote
    the text; it is empty for errors from fedsilo's own checks.
    """

    def __init__(self, sentence: str, detail: str = "") -> None:
        super().__init__(sentence)
        self.detail = detail


def read_yaml(
    path: Path, error: type[FedsiloError], parse: Callable[[str, str], Any] | None = None
) -> Any:
    """Read a YAML file in UTF-8, and return its content. An empty file gives None.

    Args:
        path: the file.
        error: the class of the error to raise if the file cannot be used.
        parse: parses the file's text. Its second argument is the path as a string, for errors. None
            stands for ``parse_yaml``.

    Raises:
        FedsiloError: the file cannot be read, is larger than 1 GiB or is not UTF-8, or ``parse``
            raises a YamlError. The class of the error is ``error``.
    """
    fault = file_fault(path)
    if fault is None:
        try:
            return (parse or parse_yaml)(path.read_text(encoding="utf-8"), str(path))
        except OSError as reason:
            fault = f"cannot be read: {reason.strerror}"
        except UnicodeDecodeError:
            fault = "is not valid UTF-8 text"
        except YamlError as refused:
            raise error(str(refused)) from None
    raise error(f"{path} {fault}")


def read_own_yaml(path: Path) -> Any:
    """Read a YAML file that is part of fedsilo, without checks.

    A test reads all of these files with ``read_yaml``.
    """
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)


def parse_yaml(text: str, file: str = "it") -> Any:
    """Parse a YAML string. An empty string gives None.

    Args:
        text: the string.
        file: the name of the file or setting that has the string. Each error begins with this name.

    Raises:
        YamlError: the string is not valid YAML, has a key twice in a mapping, has a forbidden
            character, contains itself by an alias, or is too large. The limits are 2^19 characters
            in all, 300 characters in a single value, 32 levels and 1,000,000 values.
    """
    try:
        if len(text) > _LONGEST_TEXT:
            raise YamlError(f"has {len(text)} characters, more than {_LONGEST_TEXT}")
        _refuse_deep(text)
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check_node(root, loader, {})
        return loader.construct_document(root)
    except YamlError as error:
        raise YamlError(f"{file} {error}") from None
    except _YAML_FAULTS as error:
        mark = getattr(error, "problem_mark", None)
        where = ""
        if mark is not None:
            where = f" (line {mark.line + 1})"
        detail = " ".join(str(error).split())
        raise YamlError(f"{file} is not valid YAML{where}", detail) from None


def _refuse_deep(text: str) -> None:
    """Check that lists and mappings in a YAML text are nested at most 32 levels deep.

    The text is parsed without building nodes, because libyaml would overflow the stack while it
    builds deeply nested nodes.

    Raises:
        YamlError: a list or mapping is nested too deep. The error names the line.
        yaml.YAMLError: the text is not valid YAML for another reason.
    """
    depth, line = 0, 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            elif isinstance(event, yaml.NodeEvent) and depth > _DEEPEST:
                line = _line_of(event)
                break
            elif isinstance(event, yaml.CollectionStartEvent):
                depth += 1
    except yaml.MarkedYAMLError as error:
        # Newer versions of libyaml refuse a depth of their own before any event
        if "nesting depth" not in str(error.problem) or not error.problem_mark:
            raise
        line = error.problem_mark.line + 1
    if line:
        raise YamlError(f"is nested deeper than {_DEEPEST} levels (line {line})")


def _check_node(node: yaml.Node, loader: yaml.SafeLoader, sizes: dict[int, int]) -> int:
    """Check a node of parsed YAML and all nodes below it, and return the number of values in it.

    A scalar is one value. A mapping or list counts as one value itself, plus the values in its keys
    and items. Nodes that aliases repeat count each time, because a short text with aliases could
    otherwise fill the memory.

    Args:
        node: the node.
        loader: constructs the keys of a mapping, so that they can be compared.
        sizes: id of a node -> its number of values, for all nodes checked so far. This function
            adds to the mapping, and checks no node twice. During its check a node has the number 0.
            A node that is found again with 0 therefore contains itself.

    Raises:
        YamlError: a scalar is too long or has a forbidden character, a mapping has a key twice, a
            node contains itself, or there are more than 1,000,000 values.
    """
    known = sizes.get(id(node))
    if known == 0:
        raise YamlError(f"refers to itself (line {_line_of(node)})")
    if known is not None:
        return known
    sizes[id(node)] = 0
    below: Iterable[yaml.Node] = ()
    fault = None
    if isinstance(node, yaml.ScalarNode):
        fault = _find_scalar_fault(node)
    elif isinstance(node, yaml.MappingNode):
        fault = _find_duplicate_key(node, loader)
        below = chain.from_iterable(node.value)
    else:
        below = node.value
    if fault:
        raise YamlError(fault)
    size = 1
    for child in below:
        size += _check_node(child, loader, sizes)
    if size > _LARGEST:
        raise YamlError(f"has more than {_LARGEST} values")
    sizes[id(node)] = size
    return size


def _find_scalar_fault(node: yaml.ScalarNode) -> str | None:
    """Describe the fault in a scalar's text; None if it has none.

    The description follows the file's name, as in "contains a character that is not text (line 3)".
    The text must have at most 300 characters and no lone surrogates. The only control characters
    allowed are tab, line feed and carriage return.
    """
    if _UNWRITABLE.search(node.value):
        return f"contains a character that is not text (line {_line_of(node)})"
    if len(node.value) > _LONGEST:
        line = _line_of(node)
        return f"contains a text of more than {_LONGEST} characters (line {line}): shorten it"
    return None


def _find_duplicate_key(node: yaml.MappingNode, loader: yaml.SafeLoader) -> str | None:
    """Describe the first key that a mapping has twice; None if all keys differ.

    The description follows the file's name, as in "has the key 'a' twice (line 3)". Keys are
    compared as YAML reads them, so 1 and 01 are equal. The keys of nested mappings are not
    compared. Keys that are lists or mappings are skipped.
    """
    keys = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            # PyYAML refuses a key that is a list or a mapping
            continue
        key = key_node.value
        if key_node.tag not in ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"):
            # 1 and 01 are two texts, but one key
            key = loader.construct_object(key_node)
        if key in keys:
            shown = one_line(key_node.value, _LONGEST_KEY)
            return f"has the key '{shown}' twice (line {_line_of(key_node)})"
        keys.add(key)
    return None


def _line_of(node: yaml.Node | yaml.NodeEvent) -> int:
    line: int = node.start_mark.line  # type: ignore[union-attr]  # every node that was read has one
    return line + 1


def parse_structure(key: str, text: str, example: str) -> Any:
    """Parse a setting's value, which is a YAML string, into a mapping or a list.

    Strings such as "1e-3", which YAML 1.1 does not read as numbers, become floats at any depth. An
    empty value gives an empty mapping or list. The keys and values are not checked.

    Args:
        key: the setting, for errors.
        text: the value of the setting.
        example: a valid value, which errors show. If it is a mapping, the result must be one too,
            and likewise for a list.

    Raises:
        SettingError: the value is not valid YAML, or its content has another type.
    """
    # The example serves two purposes: it has the wanted type, and errors show it to the user
    kind: type = type(parse_yaml(example))
    try:
        content = parse_yaml(text)
    except YamlError as error:
        raise SettingError(
            f"setting '{key}' is {quote_value(text)}: {error}; write {example}"
        ) from None
    if content is None:
        return kind()
    if not isinstance(content, kind):
        what = "a mapping"
        if kind is list:
            what = "a list"
        raise SettingError(
            f"setting '{key}' is {quote_value(text)}; it must be {what}, as {example}"
        )
    return with_numbers(content)


def with_numbers(content: Any) -> Any:
    """Replace strings such as '1e-3' in parsed YAML by floats, at any depth. Keys stay strings.

    YAML 1.1 reads such numbers as strings. Numbers without an exponent are not replaced: "1e5"
    becomes 100000.0, but the strings "5" and "1.5" stay strings. The argument is not changed.
    """
    if isinstance(content, dict):
        return {key: with_numbers(value) for key, value in content.items()}
    if isinstance(content, list):
        return [with_numbers(value) for value in content]
    if isinstance(content, str) and _NUMBER.fullmatch(content):
        return float(content)
    return content
