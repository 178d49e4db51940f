"""Rules for the names of sites, and the form of a name in paths.

A name may have letters and digits of any script, spaces and most punctuation ('Süd', "St. Mary's",
'東京'). Its folders and files are named by ``folder_name``, which every file system, archive and
shell accepts. ``site_of_folder`` converts such a folder's name back.

A plain name (ASCII letters, digits, '.', '_' and '-') is its own folder's name. In other names each
run of other characters becomes their Unicode numbers between two '+': 'Süd' is in ``S+fc+d``.
No two names share a folder, because a plain name has no '+'.
"""

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from fedsilo.core.errors import DataError
from fedsilo.core.one_line import one_line

# Characters of a name, and of a folder's name, because a file's name has at most 255 bytes
LONGEST = 64
_LONGEST_FOLDER = 160
# Tables have the mean over all sites under this name
_MEAN = "all"

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_OTHERS = re.compile(r"[^A-Za-z0-9._-]+")
_ENCODED = re.compile(r"\+([0-9a-f]+(?:\.[0-9a-f]+)*)\+")
# These separate names in paths, commands and Markdown, or plots read them as formulas
_SEPARATORS = frozenset('/\\"`$=<>|*[]{}')
# Python calls these characters printable, but they show nothing. Unicode lists most of them as
# Default_Ignorable_Code_Point: fillers, joiners and variation selectors
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)


def normalise_name(text: str) -> str:
    """Return a name in the Unicode form NFC, so that equal names are equal strings.

    A Mac writes the 'ü' of a folder's name as a 'u' and an accent, which NFC joins.
    """
    return unicodedata.normalize("NFC", text)


def is_visible(text: str) -> bool:
    """Return whether every character of a string is visible. A space counts as visible.

    Control characters, characters that change the direction of writing, and characters without a
    shape or width are not visible. An empty string gives True.
    """
    return text.isprintable() and not _INVISIBLE.search(text)


def is_site_name(text: str) -> bool:
    """Return whether a string has the form of a site's name, by the rules of ``_find_fault``.

    The reserved name 'all' has this form.
    """
    return bool(_PLAIN.fullmatch(text)) or not _find_fault(text)


def site_name_fault(name: str) -> str | None:
    """Explain in a sentence why a string cannot be a site's name; None if it can.

    A name has 1 to 64 visible characters in the Unicode form NFC. It begins with a letter, a digit
    or '_'. It has no separator such as '/' or '$', no two spaces in a row and no space at the end.
    The encoded name of its folder has at most 160 characters.

    The name 'all' is refused, because it stands for the mean over sites. Names that the form NFKC
    turns into 'all' are refused too, but 'ALL' is accepted.
    """
    if is_site_name(name):
        # Another form of the same letters, such as full-width ones, would look like it
        if unicodedata.normalize("NFKC", name) == _MEAN:
            return "site 'all' must have another name, because 'all' stands for the mean over sites"
        return None
    return f"'{one_line(name, LONGEST)}' cannot be a site's name: {_find_fault(name)}"


def _find_fault(name: str) -> str:
    """Explain in a clause which rule a name breaks; an empty string if it breaks none.

    The rules are checked in this order:

    - The name has 1 to 64 characters, each accepted by ``is_visible``, in the Unicode form NFC.
    - It begins with a letter, a digit or '_'.
    - It has none of the characters that separate names elsewhere, such as '/' (``_SEPARATORS``).
    - It does not have two spaces in a row or a space at its end.
    - The site's folder, which ``folder_name`` names, has a name of at most 160 characters.

    The reserved name 'all' breaks none of these rules.
    """
    if not 0 < len(name) <= LONGEST:
        return f"it must have 1 to {LONGEST} characters"
    if not is_visible(name):
        return "every character must be visible, and none may change the direction of writing"
    if name != normalise_name(name):
        return "it must be in the Unicode form NFC"
    if not (name[0].isalnum() or name[0] == "_"):
        return "it must begin with a letter, a digit or '_'"
    separators = sorted(_SEPARATORS & set(name))
    if separators:
        return f"it must not have the character {separators[0]}"
    if name.endswith(" ") or "  " in name:
        return "it must not end with a space or have two spaces in a row"
    if len(folder_name(name)) > _LONGEST_FOLDER:
        return "its letters make the name of its folder too long: use a shorter name"
    return ""


def folder_name(site: str) -> str:
    """Return the name that a site has in paths: ASCII letters, digits, '.', '_', '-' and '+'.

    A plain name is returned unchanged. The result cannot lead out of a folder.
    """
    return _OTHERS.sub(_encode, site)


def site_of_folder(name: str) -> str:
    """Return the name of the site whose folder has this name, in the Unicode form NFC.

    This reverses ``folder_name``, which encodes some characters: the folder 'S+fc+d' belongs to the
    site 'Süd'. If ``folder_name`` never makes the name, as for 'Süd', the site has the same name as
    the folder.
    """
    try:
        site = _ENCODED.sub(_decode, name)
    except (ValueError, OverflowError):
        return normalise_name(name)
    # A user's own folder may look encoded, such as 'HER2+3+', but stands for no other name
    if folder_name(site) == name and is_site_name(site):
        return site
    return normalise_name(name)


def find_by_site(paths: Mapping[str, Path]) -> dict[str, Path]:
    """Map each site to the user's folder or file that is named after it.

    Args:
        paths: name -> path. A name is that of a folder, or that of a file without its ending. It is
            either a site's name, or a site's name as ``folder_name`` encodes it.

    Returns:
        Site -> its path, in the order of ``paths``.

    Raises:
        DataError: two paths belong to one site, or a name cannot be a site's name.
    """
    found: dict[str, Path] = {}
    for name, path in paths.items():
        site = site_of_folder(name)
        fault = site_name_fault(site)
        if fault:
            raise DataError(f"{path.parent}: {fault}: rename {one_line(name, LONGEST)}")
        if site in found:
            raise DataError(
                f"{path.parent}: '{found[site].name}' and '{path.name}' are both of site '{site}': "
                "join or rename them"
            )
        found[site] = path
    return found


def _encode(run: re.Match[str]) -> str:
    numbers = ".".join(f"{ord(character):x}" for character in run[0])
    return f"+{numbers}+"


def _decode(run: re.Match[str]) -> str:
    return "".join(chr(int(number, 16)) for number in run[1].split("."))
