"""A hospital's kit: one zip with the files that its node needs, made by the server's operator.

``kit.json`` names the hospital and the server, and has the SHA-256 of every other file. The seal is
the SHA-256 of these values; both sides print its beginning, so that people can compare it. A kit
contains neither rules nor keys of other hospitals, because each hospital decides on them itself.
"""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from fedsilo.core.errors import FedsiloError
from fedsilo.core.files.atomic_files import read_regular, write_atomically
from fedsilo.core.files.declarations import FileModel
from fedsilo.core.files.unpacked_size import PACKINGS
from fedsilo.datasets.silo.declared_silos import SiteName

AUTHORITY, KEY, CARD = "ca.crt", "node.key", "kit.json"
_README = "README.txt"
_SEALED = (AUTHORITY, KEY, _README)
_NAMES = (CARD, *_SEALED)
# Kits of older versions had these files, when the server still made rules and signing keys
_FORMER = ("site.yaml", "registry.json")
# The errors that zipfile raises for a damaged file; OSError if it seeks before the file's start
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, EOFError, OSError),
    *(ValueError, NotImplementedError, RuntimeError),
)
_LARGEST = 2**20  # bytes; the largest size of a file in a kit


class KitError(FedsiloError):
    """A kit cannot be used.

    Fix: correct what the message names. If the kit is damaged, the server's operator makes a new
    one by ``fedsilo deploy renew SITE``.
    """

    code = "kit"


class Card(FileModel):
    """The content of ``kit.json``."""

    site: SiteName
    server: Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+:[0-9]{1,5}$")]
    node_id: Annotated[str, Field(pattern=r"^[0-9]{1,20}$")]  # the hospital's node id at the server
    made: Annotated[str, Field(pattern=r"^[0-9TZ:.+-]{1,40}$")]  # ISO 8601, UTC
    files: dict[str, str]  # SHA-256 by name
    seal: str

    def compute_seal(self) -> str:
        """Compute the seal from the other values: a SHA-256 as hexadecimal digits."""
        content = self.model_dump(exclude={"seal"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Kit:
    """A kit whose files are complete and unaltered."""

    path: Path  # the zip, or the folder where it was opened
    card: Card
    files: Mapping[str, bytes]  # file name -> content

    @property
    def code(self) -> str:
        """The first 16 digits of the seal, in groups of four, to be read out by telephone."""
        digits = self.card.seal
        return "-".join([digits[:4], digits[4:8], digits[8:12], digits[12:16]])

    def write(self, folder: Path) -> None:
        """Write all files of the kit into an existing folder, readable only by their owner.

        Files of the same names are replaced.
        """
        for name, content in self.files.items():
            write_atomically(folder / name, content, mode=0o600)


def make_kit(site: str, server: str, node: str, made: str, files: Mapping[str, bytes]) -> bytes:
    """Build the zip of a kit, the files that a hospital needs to connect to the server.

    The zip has the given files, a readme, and the card ``kit.json``. The card has the other
    arguments, the SHA-256 of each file, and a seal: the SHA-256 of all these values. The zip's
    entries have the mode 0600. Equal arguments give equal bytes. Nothing is written to disk.

    Args:
        site: the hospital's name.
        server: the address of the Fleet API, host:port.
        node: the hospital's node id at the server.
        made: the time to record, ISO 8601 in UTC.
        files: file name -> content, for the authority's certificate (``AUTHORITY``) and the
            hospital's private key (``KEY``).
    """
    readme = _text_of("kit_readme.txt", site, server).encode()
    packed_files = {**files, _README: readme}
    digests = {name: _digest(packed_files[name]) for name in _SEALED}
    said = {"site": site, "server": server, "node-id": node, "made": made, "files": digests}
    # The seal is computed over the other values, so it is added last
    card = Card.model_validate({**said, "seal": ""})
    card = card.model_copy(update={"seal": card.compute_seal()})
    packed_files |= {CARD: card.model_dump_json(by_alias=True, indent=2).encode()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in packed_files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o100600 << 16  # unzip too makes files that only the owner reads
            archive.writestr(entry, content)
    return packed.getvalue()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _text_of(name: str, site: str, server: str) -> str:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return text.replace("SITE", site).replace("SERVER", server)


def read_kit(path: Path) -> Kit:
    """Read a hospital's kit from its zip, or from the folder where it was opened, and check it.

    The files must have the SHA-256 values in the kit's card, ``kit.json``, and the card must match
    its own seal. The kit has no signature, so the check does not prove who made it. Hospital and
    server compare the kit's code by telephone for that.

    Returns:
        The kit with its path, its card, and its files as a mapping of names to contents.

    Raises:
        KitError: the path does not exist, is not a complete kit, or is damaged or altered. A zip
            that other users may access is refused too. The files of a folder may have any mode.
        PermissionError: this user cannot read the zip.
    """
    files = _read_folder(path) if path.is_dir() else _read_zip(path)
    for name in _NAMES:
        if name not in files:
            raise KitError(f"{path} is not a complete kit: it has no {name}")
    try:
        card = TypeAdapter(Card).validate_json(files.pop(CARD))
    except ValueError:
        raise KitError(f"{path} is damaged: {CARD} cannot be read; {_ANOTHER}") from None
    # The card has the digest of each file, and the seal is the digest of the card's values. Whoever
    # changes both makes a kit of another seal, which people notice by telephone
    altered = ""
    for name in _SEALED:
        if not altered and _digest(files[name]) != card.files.get(name):
            altered = name
    if not altered and card.compute_seal() != card.seal:
        altered = CARD
    if altered:
        raise KitError(f"{path} was altered: {altered} does not match the seal; {_ANOTHER}")
    files[CARD] = card.model_dump_json(by_alias=True, indent=2).encode()
    return Kit(path, card, files)


_ANOTHER = "do not use the kit, and ask the server's operator for another"


def _read_zip(path: Path) -> dict[str, bytes]:
    """Read all files in a kit's zip, as a mapping of file names to contents.

    Whether a file is missing is not checked. The zip may be a symbolic link to a regular file.

    Raises:
        KitError: the zip does not exist, is damaged, or is not a regular file. Also raised if it
            has a file that no kit has, or if its mode gives other users any access.
        PermissionError: this user cannot read the zip.
    """
    try:
        mode = path.stat().st_mode & 0o777
        # A link is followed, because a mounted secret is one, but a pipe is not waited for
        with zipfile.ZipFile(io.BytesIO(read_regular(path.resolve()))) as archive:
            _refuse_entries(path, archive.infolist())
            files = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    # These two are OSErrors, so they come before the errors of a damaged file
    except FileNotFoundError:
        raise KitError(
            f"{path} does not exist: name the zip that 'fedsilo deploy add' made"
        ) from None
    except PermissionError:
        raise
    except _BROKEN as error:
        raise KitError(f"{path} is not a readable zip ({error}): copy it again") from None
    # Checked last, because a file that is not a kit needs another message
    if mode & 0o077:
        raise KitError(
            f"{path} has mode {mode:o}, so other users may read the private key in it: chmod 600 "
            "the file, and ask for a new kit if somebody may have read it"
        )
    return files


def _refuse_entries(path: Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    """Check that a zip contains only files of a kit, so that unpacking it is safe.

    The files of a kit are kit.json, ca.crt, node.key and README.txt, without a folder. Each may
    occur once, and may have at most 1 MiB when unpacked. The sizes are those that the zip states. A
    file must be stored or compressed by deflate. A missing file is not refused here.

    Args:
        path: the path of the zip, for errors.
        entries: the entries of the zip.

    Raises:
        KitError: an entry breaks one of these rules. For a file that only kits of older versions
            have, the message asks for a new kit.
    """
    names = [entry.filename for entry in entries]
    for entry in entries:
        name = entry.filename
        fault = ""
        if name in _FORMER:
            fault = (
                f"has its own {name}, as kits of older versions did, but a hospital now makes its "
                "rules and signing keys itself: do not use the kit, and ask the server's operator "
                "for another ('fedsilo deploy renew SITE')"
            )
        # A path such as ../../.bashrc is not among these names either, so nothing is written
        # elsewhere
        elif name not in _NAMES:
            fault = f"has a file '{name}', which no kit has"
        elif names.count(name) > 1:
            fault = f"has {name} twice: {_ANOTHER}"
        elif entry.file_size > _LARGEST:
            fault = f"has {name} of {entry.file_size} bytes"
        elif entry.compress_type not in PACKINGS:  # others unpack to any size at once
            fault = f"has {name} packed in an unusual way: {_ANOTHER}"
        if fault:
            raise KitError(f"{path} {fault}")


def _read_folder(path: Path) -> dict[str, bytes]:
    """Read the files of a kit that is unpacked in a folder, as a mapping of file names to contents.

    A missing file is left out of the result, and other files in the folder are ignored.

    Raises:
        KitError: one of the kit's files cannot be read, or is not a regular file.
    """
    files = {}
    for name in _NAMES:
        try:
            files[name] = read_regular(path / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise KitError(f"{path / name} cannot be read ({error.strerror})") from None
    return files
