"""``fedsilo hospital keys``: the signing keys of this hospital and of other hospitals."""

from collections.abc import Sequence
from pathlib import Path

from fedsilo.client_app.privacy.signing import KnownKey, KnownKeys, own_code
from fedsilo.client_app.site.node import OWN
from fedsilo.core.errors import SettingError
from fedsilo.core.files.site_names import site_of_folder


def find_own_folder(folder: Path) -> Path:
    """Find the folder in which a hospital keeps its keys and its private state over all runs.

    The folder is ``<state-dir>/.own/<site>``, and contains the file ``signing.key``.

    Args:
        folder: the folder of an opened kit, or a 'state-dir'. In a kit, the 'state-dir' is the
            folder ``state``. A folder directly below one named ``.own`` is returned without a
            check.

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

    This hospital refuses secure sums with a hospital whose key is not marked as compared. All of
    ``compared`` are processed first, in order, then all of ``forget``. Changes made before an error
    are kept.

    Args:
        folder: the hospital's own folder, as ``find_own_folder`` returns it.
        compared: SITE, whose latest received key was compared, or SITE=CODE with the code that SITE
            read out. Only a key with this code will be accepted, even if it has not been received
            yet.
        forget: sites to remove from the list of known keys.

    Raises:
        SettingError: a site name or a code is invalid, ``compared`` names this hospital itself, or
            ``forget`` names an unknown site. SITE without a code is refused if no key was received,
            or if ``describe_keys`` has not listed the key that was received last.
        CheckpointError: the list is damaged, or cannot be written.
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

    A key's code is a short hash that people can read aloud. The first line has the code of the
    hospital's own key, to be read out to other hospitals. The other lines are sorted by site, and
    have the key's code and the date of its comparison, if any. If there are none, the second line
    explains the option ``--compared SITE=CODE``. The listed keys are recorded as shown.
    ``mark_keys`` then accepts the name of such a site without the code.

    Args:
        folder: the hospital's own folder, as ``find_own_folder`` returns it.

    Raises:
        CheckpointError: the list of keys is damaged, or cannot be written.
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
