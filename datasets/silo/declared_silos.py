"""The parts that declaration files (YAML) share: site names, classes, and the reader for a file.

Errors name the file and the key, but never a value, because a value may identify a patient. The
module is imported only when a declaration is read.
"""

from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator

from fedsilo.core.errors import DataError
from fedsilo.core.files.declarations import FileModel, Text, check_content, fault
from fedsilo.core.files.site_names import is_visible, normalise_name, site_name_fault
from fedsilo.core.files.text_files import read_text, same_text
from fedsilo.core.files.yaml_text import YamlError, parse_yaml
from fedsilo.core.one_line import quote_value

M = TypeVar("M", bound=FileModel)


def read_declared(path: Path, model: type[M]) -> M:
    """Read a YAML file that describes the user's data, and validate it as ``model`` (pydantic).

    Raises:
        DataError: the file is missing or not valid YAML, a key is unknown, a required key is
            missing, or a value is invalid. The error starts with the path.
    """
    try:
        content = parse_yaml(read_text(path), str(path))
    except YamlError as error:
        raise DataError(str(error)) from None
    declared: M = check_content(model, content, lambda sentence: DataError(f"{path}: {sentence}"))
    return declared


def _plain_sites(content: Any) -> Any:
    if not isinstance(content, dict) or not content:
        raise fault("'sites' must map each site's name to its CSV file")
    for name in content:
        _check_site_name(normalise_name(str(name)))
    return _of_distinct_names(content, "sites")


def _lists_by_name(content: Any) -> Any:
    if not isinstance(content, dict) or len(content) < 2:
        raise fault("'classes' must map at least two class names to lists of label values")
    for name in content:
        if not is_visible(str(name)):
            raise fault(f"the class {quote_value(name)} has a character that cannot be seen")
    return _of_distinct_names(content, "classes")


def _of_distinct_names(content: dict[Any, Any], key: str) -> dict[Any, Any]:
    # 1 and '1', or an 'ü' of one character and one of two
    if len({normalise_name(str(name)) for name in content}) < len(content):
        raise fault(f"under '{key}' two names are the same text: rename one")
    return content


def _one_class_each(classes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Normalise the label values in a declaration of classes, and check that each appears once.

    ``same_text`` normalises the values, so that '1.0' and '1' become equal.

    Args:
        classes: class name -> label values.

    Returns:
        The same class names -> normalised label values.

    Raises:
        ValueError: two normalised values are equal, or a class has no values.
    """
    forms = {name: list(map(same_text, values)) for name, values in classes.items()}
    every = list(chain(*forms.values()))
    if len(set(every)) < len(every) or not all(forms.values()):
        raise fault(
            "under 'classes' each label value must appear once, but one appears twice or a class "
            "has none: correct the lists"
        )
    return forms


def _check_site_name(name: str) -> str:
    wrong = site_name_fault(name)
    if wrong:
        raise fault(wrong)
    return name


SiteName = Annotated[str, AfterValidator(_check_site_name)]
Sites = Annotated[dict[Text, Text], BeforeValidator(_plain_sites)]
ClassLists = Annotated[
    dict[Text, list[Text]], BeforeValidator(_lists_by_name), AfterValidator(_one_class_each)
]
