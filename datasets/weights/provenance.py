"""Check that a run's initial weights were not trained on images that it tests.

A run's ``config.toml`` is next to its ``model.safetensors`` and records how its data were split.
"""

import tomllib
from pathlib import Path

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import RENAMED
from fedsilo.core.settings.written_settings import flat_values
from fedsilo.core.settings_schema import (
    Value,
    as_mapping,
    build,
    defaults,
    groups_of,
    keys_with,
    values_of,
)
from fedsilo.datasets.registry import data_set

# These settings change images, or the validation part, but not the choice of test images
_SAME_TEST = frozenset(keys_with(CommonSettings, "files", "validation", "pixels"))
PARTITION = frozenset(keys_with(CommonSettings, "partition"))


def provenance_of(settings: CommonSettings) -> dict[str, Value]:
    """Map the key of each setting that decides which images are test images to its value.

    Two runs on one data set with equal results have the same test images. The result has all
    settings that the data set reads, except those in ``_SAME_TEST``. The exceptions, such as
    'data.dir', change only the pixels, the places of files or the validation part. If the data set
    reads 'split.silos', the settings of the partition are added. In other data sets the partition
    does not change the test part.
    """
    keys = data_set(settings.dataset).settings - _SAME_TEST
    if "split.silos" in keys:
        keys |= PARTITION
    values = as_mapping(settings)
    return {key: values[key] for key in keys}


def refuse_other_provenance(here: CommonSettings, there: CommonSettings, what: str) -> None:
    """Check that the weights of one run were not trained on test images of this run.

    The check passes if the data sets differ, because different data sets share no images. On one
    data set, all settings that ``provenance_of`` returns must be equal in both runs. The two runs
    then have the same test images.

    Args:
        here: the settings of this run, which tests.
        there: the settings of the run that trained the weights.
        what: a description of the weights, for the error.

    Raises:
        SettingError: a setting of ``provenance_of`` differs. The error names the first one in
            alphabetical order.
    """
    if here.dataset != there.dataset:
        return
    # Other data sets share no images, and the same settings choose the same test images
    now = provenance_of(here)
    then = provenance_of(there)
    for key in sorted(now):
        if now[key] != then[key]:
            raise SettingError(
                f"'{key}' is {now[key]!r}, but {what} was trained with {then[key]!r}, so images "
                f"that it has trained on might be tested: set '{key}' to the run's value"
            )


def run_beside(weights: Path) -> CommonSettings | None:
    """Read the settings of the run that wrote a weights file, from ``config.toml`` in its folder.

    Settings that this version does not know are ignored.

    Returns:
        The settings, or None if ``config.toml`` is missing, cannot be read or is not TOML.

    Raises:
        SettingError: a setting has an invalid value.
    """
    config = weights.parent / "config.toml"
    if not config.is_file():
        return None
    try:
        values = tomllib.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        return None
    # The tables of the launch and of the method would not flatten, and do not concern the data
    known = groups_of(CommonSettings).keys() | defaults(CommonSettings).keys() | RENAMED.keys()
    for key in values.keys() - known:
        del values[key]
    flat = flat_values(values, str(config), quietly=True)
    # An older version may have had further settings in these groups
    return build(CommonSettings, values_of(CommonSettings, flat))
