"""``fedsilo hospital keys``: the signing keys of this hospital and of other hospitals."""

from collections.abc import Sequence
from pathlib import Path

from fedsilo.client_app.privacy.signing import KnownKey, KnownKeys, own_code
from fedsilo.client_app.site.node import OWN
from fedsilo.core.errors import SettingError
from fedsilo.core.files.site_names import site_of_folder


def find_own_folder(folder: Path) -> Path:
    """Find the folder in which a hospital keeps its keys and its private state over all runs.

    ``folder`` is an opened kit or a 'state-dir'. A folder directly below one named ``.own`` is
    returned without a check.

    Raises:
        SettingError: no signing key is found, or more than one site has a key.
    """
    folder = folder.expanduser().resolve()
    if folder.parent.name == OWN:
        return folder
    # A 'state-dir' contains the folder itself, an opened kit contains it below 'state'
    for place in (folder / OWN, folder / "state" / OWN):
        found = [path.parent for path in sorted(place.glob("*/signing.key"))]
        if len(found) > 1:
            names = ", ".join(site_of_folder(path.name) for path in found)
            raise SettingError(
                f"{place} has the folders of several sites ({names}): name {place}/SITE"
            )
        if found:
            return found[0]
    raise SettingError(
        f"{folder} has no signing key: name the folder into which 'fedsilo hospital start' opened "
        "the kit, or the 'state-dir'; the key is made at the first start"
    )


def mark_keys(folder: Path, compared: Sequence[str], forget: Sequence[str]) -> None:
    """Mark other hospitals' signing keys as compared by telephone, or forget the keys.

    ``compared`` has sites, or SITE=CODE with the code that SITE read out. A site without a code
    must have been shown by ``describe_keys``. Changes before an error are kept.

    Raises:
        SettingError: a site or a code cannot be used.
        CheckpointError: the list of keys is unusable.
    """
    known = KnownKeys(folder)
    for text in compared:
        site, _, code = text.partition("=")
        if site.strip() == site_of_folder(folder.name):
            raise SettingError(f"{site} is this hospital itself: name another hospital")
        known.mark(site.strip(), code)
    for site in forget:
        known.forget(site)


def describe_keys(folder: Path) -> list[str]:
    """Describe the signing keys that a hospital knows, one line each, with its own key first.

    A line has the key's code, a short text that hospitals compare by telephone. Another hospital's
    line also has the date of the comparison, if any.

    Raises:
        CheckpointError: the list of keys cannot be read or written.
        RefusedError: this hospital's key file cannot be used.
    """
    known = KnownKeys(folder).show()
    own_site = site_of_folder(folder.name)
    width = max(len(site) for site in (own_site, *known))
    lines = [f"{own_site:{width}}  {own_code(folder)}  this hospital: read it to the others"]
    for site, key in sorted(known.items()):
        lines.append(f"{site:{width}}  {_describe_key(site, key)}")
    if not known:
        lines.append("no other hospital's key is known: --compared SITE=CODE as SITE reads it out")
    return lines


def _describe_key(site: str, key: KnownKey) -> str:
    if not key.compared:
        return f"{key.received}  NOT COMPARED: ask {site} by telephone, then --compared {site}"
    if key.received not in ("", key.compared):
        return (
            f"{key.received}  ANOTHER KEY than {key.compared}, compared on {key.day}: ask {site} "
            f"by telephone, then --compared {site} or --forget {site}"
        )
    return f"{key.compared}  compared on {key.day}"
