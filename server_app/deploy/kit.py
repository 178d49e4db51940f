"""A hospital's kit: one zip with all that its node needs, made by the server, opened by the site.

``kit.json`` says whose kit it is, for which server, and the SHA-256 of every other file. The seal
is the SHA-256 of all that; both sides print its beginning, so that people can compare it. A kit
brings neither rules nor keys of other hospitals: those are the hospital's own.
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

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.datasets.io.declarations import FileModel
from fedsilo.datasets.io.regular_files import read_regular
from fedsilo.datasets.io.unpacked_size import PACKINGS
from fedsilo.datasets.silo.declared_silos import SiteName
from fedsilo.models.contract.errors import FedsiloError

AUTHORITY, KEY = "ca.crt", "node.key"
_CARD, _README = "kit.json", "README.txt"
_SEALED = (AUTHORITY, KEY, _README)
_NAMES = (_CARD, *_SEALED)
# Kits brought these until rules and keys were hospitals' own
_FORMER = ("site.yaml", "registry.json")
# What zipfile raises of a damaged file: OSError where it seeks to before the file's beginning
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, EOFError, OSError),
    *(ValueError, NotImplementedError, RuntimeError),
)
_LARGEST = 2**20  # bytes of a file


class KitError(FedsiloError):
    """A kit cannot be used.

    Fix: the message says what is wrong with it; the server's operator makes another one by
    ``fedsilo deploy renew SITE``.
    """

    code = "kit"


class Card(FileModel):
    """``kit.json``."""

    site: SiteName
    server: Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+:[0-9]{1,5}$")]
    node_id: Annotated[str, Field(pattern=r"^[0-9]{1,20}$")]  # the server's number of it
    made: Annotated[str, Field(pattern=r"^[0-9TZ:.+-]{1,40}$")]  # ISO 8601, UTC
    files: dict[str, str]  # SHA-256 by name
    seal: str

    def computed(self) -> str:
        """Return the seal that the other values have."""
        content = self.model_dump(exclude={"seal"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Kit:
    """A kit whose files are complete and unaltered."""

    path: Path  # the zip, or the folder into which it was opened
    card: Card
    files: Mapping[str, bytes]  # by name

    @property
    def code(self) -> str:
        """The beginning of the seal, which people can read to one another."""
        return "-".join(self.card.seal[i : i + 4] for i in range(0, 16, 4))

    def write(self, folder: Path) -> None:
        """Write the files into a folder, for their owner alone."""
        for name, content in self.files.items():
            write_atomically(folder / name, content, mode=0o600)


def make_kit(site: str, server: str, node: str, made: str, files: Mapping[str, bytes]) -> bytes:
    """Return the zip of a kit; ``made`` is the time of its making, ISO 8601.

    ``server`` is the address of the Fleet API, host:port, and ``node`` the server's number of the
    site. ``files`` are the authority's certificate and the private key.
    """
    readme = _text_of("kit_readme.txt", site, server).encode()
    packed_files = {**files, _README: readme}
    digests = {name: hashlib.sha256(packed_files[name]).hexdigest() for name in _SEALED}
    said = {"site": site, "server": server, "node-id": node, "made": made, "files": digests}
    card = Card.model_validate({**said, "seal": ""})
    card = card.model_copy(update={"seal": card.computed()})
    packed_files |= {_CARD: card.model_dump_json(by_alias=True, indent=2).encode()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in packed_files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o100600 << 16  # its owner's alone, also when unzip opens it
            archive.writestr(entry, content)
    return packed.getvalue()


def _text_of(name: str, site: str, server: str) -> str:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return text.replace("SITE", site).replace("SERVER", server)


def read_kit(path: Path) -> Kit:
    """Return the kit of a zip, or of the folder into which one was opened.

    Raises:
        KitError: it is not a kit, others may read it, or it was altered.
    """
    files = _folder(path) if path.is_dir() else _zip(path)
    if missing := [name for name in _NAMES if name not in files]:
        raise KitError(f"{path} is not a complete kit: it has no {missing[0]}")
    try:
        card = TypeAdapter(Card).validate_json(files.pop(_CARD))
    except ValueError:
        raise KitError(f"{path} is damaged, as {_CARD} cannot be read: {_ANOTHER}") from None
    changed = [n for n in _SEALED if hashlib.sha256(files[n]).hexdigest() != card.files.get(n)]
    if changed or card.computed() != card.seal:
        raise KitError(
            f"{path} was altered: {(changed or [_CARD])[0]} is not as sealed: {_ANOTHER}"
        )
    files[_CARD] = card.model_dump_json(by_alias=True, indent=2).encode()
    return Kit(path, card, files)


_ANOTHER = "use none of it, ask the server's operator for another"


def _zip(path: Path) -> dict[str, bytes]:
    """Return the files of a zip, which may have the names of a kit only."""
    try:
        mode = path.stat().st_mode & 0o777
        # A link is followed, because a mounted secret is one, but a pipe is not waited for
        with zipfile.ZipFile(io.BytesIO(read_regular(path.resolve()))) as archive:
            _refuse_entries(path, archive.infolist())
            files = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    except FileNotFoundError:
        raise KitError(f"there is no {path}: name the zip that 'fedsilo deploy add' made") from None
    except PermissionError:
        raise
    except _BROKEN as error:
        raise KitError(f"{path} is not a readable zip ({error}): copy it again") from None
    if mode & 0o077:
        raise KitError(
            f"{path} has mode {mode:o}, others may read the private key in it: chmod 600 it, and "
            "ask for a new kit if somebody may have"
        )
    return files


def _refuse_entries(path: Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse a zip that has other files than a kit, one of them twice, or a large one."""
    names = [entry.filename for entry in entries]
    for entry in entries:
        name = entry.filename
        fault = ""
        if name in _FORMER:
            fault = (
                f"brings its own {name}, as kits did until rules and signing keys became the "
                "hospital's own: use none of it, and ask the server's operator for another "
                "('fedsilo deploy renew SITE')"
            )
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


def _folder(path: Path) -> dict[str, bytes]:
    files = {}
    for name in _NAMES:
        try:
            files[name] = read_regular(path / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise KitError(f"{path / name} cannot be read ({error.strerror})") from None
    return files
