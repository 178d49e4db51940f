"""The file of a backup: a zip whose entries are encrypted with a key from a passphrase.

The key comes from scrypt, with a new salt for each backup. Each file is cut into chunks of 1 MiB,
and AES-256-GCM seals each chunk. A chunk's nonce has the file's number, the chunk's number and
whether the chunk is the last one, so no chunk can be removed, repeated or moved unnoticed.

``manifest.json`` can be read without the passphrase. It names every file with its size and the
SHA-256 of its encrypted bytes, so a damaged backup is noticed before anybody types a passphrase.
HMAC-SHA256 seals the manifest itself.
"""

import hashlib
import hmac
import json
import os
import secrets
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationError

from fedsilo.core.errors import FedsiloError
from fedsilo.core.files.atomic_files import open_regular
from fedsilo.core.files.declarations import FileModel

MANIFEST = "manifest.json"
_FILES = "files/"  # the folder of all other entries in the zip
_CHUNK = 2**20  # bytes of a file that are sealed together
_TAG = 16  # bytes that AES-GCM adds to a chunk
_LARGEST_MANIFEST = 64 * 2**20  # bytes
COST = 2**17  # scrypt's n: 128 MiB of memory and about half a second
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)


class BackupError(FedsiloError):
    """A backup cannot be made, or cannot be restored.

    Fix: follow the message. Nothing was written. If a backup is damaged, copy it again or use an
    older one; if the passphrase is lost, the backup cannot be opened.
    """

    code = "backup"


_Count = Annotated[int, Field(ge=0, le=2**63)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Salt = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class SealedFile(FileModel):
    """A file in a backup."""

    size: _Count  # bytes before the encryption
    sha256: _Digest  # taken after the encryption


class Origin(FileModel):
    """The deployment that a backup is of."""

    authority: str  # SHA-256 of the authority's certificate, which identifies the deployment
    folder: str  # absolute path of the deployment's folder
    address: str  # the server's address for hospitals on other machines, or empty
    sites: list[str]  # the sites on the server's machine
    hospitals: list[str]  # the sites on other machines


def _check_power_of_two(cost: int) -> int:
    """Return scrypt's cost, and raise ValueError if scrypt could not use it."""
    if cost.bit_count() != 1:
        raise ValueError("must be a power of 2")
    return cost


class Manifest(FileModel):
    """The content of ``manifest.json``."""

    format: Literal[1] = 1
    made: str  # ISO 8601, UTC
    versions: dict[str, str]  # software -> version that made the backup
    deployment: Origin
    salt: _Salt
    # The cost of scrypt; a forged manifest must not ask for gigabytes of memory
    cost: Annotated[int, Field(ge=2**12, le=2**20), AfterValidator(_check_power_of_two)]
    files: dict[str, SealedFile]
    seal: str = ""

    def compute_seal(self, key: bytes) -> str:
        """Compute the HMAC-SHA256 of all other values, as hexadecimal digits."""
        content = self.model_dump(by_alias=True, exclude={"seal"})
        text = json.dumps(content, sort_keys=True).encode()
        return hmac.new(key, text, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Keys:
    """The two keys of a backup, each of 32 bytes."""

    files: bytes  # encrypts files
    manifest: bytes  # seals the manifest


def derive_keys(passphrase: str, salt: str, cost: int) -> Keys:
    """Derive the two keys of a backup from its passphrase with scrypt, which is slow on purpose.

    Equal arguments give equal keys.

    Args:
        passphrase: the passphrase, of any length.
        salt: the backup's salt, in hexadecimal digits.
        cost: scrypt's n, a power of 2. The time and the memory grow in proportion to it.

    Returns:
        Two keys of 32 bytes: one for the files, one for the manifest's seal.

    Raises:
        ValueError: ``cost`` is not a power of 2.
    """
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    scrypt = Scrypt(salt=bytes.fromhex(salt), length=64, n=cost, r=8, p=1)
    derived = scrypt.derive(passphrase.encode())
    return Keys(derived[:32], derived[32:])


def _nonce(number: int, chunk: int, is_last: bool) -> bytes:
    """Build the nonce of 12 bytes with which one chunk of a file is encrypted.

    The nonce has ``number`` (4 bytes), ``is_last`` (1 byte), three zero bytes, and ``chunk`` (4
    bytes), in big-endian order. It is different for every chunk of a backup. The reader builds the
    same nonce from a chunk's place, so a moved or missing chunk does not decrypt.

    Args:
        number: the file's number in the backup, from 0.
        chunk: the chunk's number in the file, from 0.
        is_last: whether the chunk is the file's last one.
    """
    return struct.pack(">I?xxxI", number, is_last, chunk)


def _chunks(source: IO[bytes], size: int) -> Iterator[tuple[bytes, bool]]:
    """Read a file in pieces of ``size`` bytes, and yield each piece and whether it is the last.

    The last piece may be shorter. An empty file yields one empty piece.
    """
    # One piece is read ahead, because the last one is sealed as such
    piece = source.read(size)
    while True:
        following = source.read(size)
        yield piece, not following
        if not following:
            return
        piece = following


@dataclass
class SealedWriter:
    """Writes a new backup into an open file, in a ``with`` block. ``finish`` completes it."""

    target: IO[bytes]
    passphrase: str
    salt: str = field(default_factory=lambda: secrets.token_hex(16))
    files: dict[str, SealedFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cost = COST
        self._keys = derive_keys(self.passphrase, self.salt, self._cost)
        self._cipher = AESGCM(self._keys.files)
        self._zip = zipfile.ZipFile(self.target, "w")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def add(self, name: str, path: Path) -> None:
        """Encrypt a file with AES-GCM, in chunks of 1 MiB, and add it to the backup.

        Args:
            name: the file's name in the backup, a relative path with slashes.
            path: the file.

        Raises:
            OSError: the file is missing, cannot be read, or is not a regular file. Links are
                refused too. If the file cannot be opened, nothing is added.
        """
        number, size, digest = len(self.files), 0, hashlib.sha256()
        # The descriptor is opened first, so that a missing file leaves no entry
        handle = open_regular(path, os.O_RDONLY)
        with (
            open(handle, "rb") as source,
            self._zip.open(_FILES + name, "w", force_zip64=True) as entry,
        ):
            for chunk, (piece, is_last) in enumerate(_chunks(source, _CHUNK)):
                nonce = _nonce(number, chunk, is_last)
                # The name is authenticated too, so no file can take the name of another unnoticed
                sealed = self._cipher.encrypt(nonce, piece, name.encode())
                digest.update(sealed)
                entry.write(sealed)
                size += len(piece)
        self.files[name] = SealedFile(size=size, sha256=digest.hexdigest())

    def finish(self, made: str, versions: Mapping[str, str], origin: Origin) -> Manifest:
        """Add the manifest to the backup as its last entry, and return the manifest.

        The manifest lists the files with their sizes and SHA-256 values. Its seal is an HMAC with a
        key derived from the passphrase. A reader uses the seal to detect a changed manifest. Call
        this function once, after all files were added.

        Args:
            made: the time of the backup in ISO 8601, UTC.
            versions: software -> its version on this machine.
            origin: the deployment that the backup is from.
        """
        manifest = Manifest(
            made=made,
            versions=dict(versions),
            deployment=origin,
            salt=self.salt,
            cost=self._cost,
            files=self.files,
        )
        manifest = manifest.model_copy(update={"seal": manifest.compute_seal(self._keys.manifest)})
        self._zip.writestr(MANIFEST, manifest.model_dump_json(by_alias=True, indent=2))
        return manifest


class SealedReader:
    """Reads a backup. Opening it checks the SHA-256 of every file, without the passphrase.

    Args:
        path: the backup, for errors.
        source: the open file.

    Raises:
        BackupError: the file is not a backup, is truncated or altered, or has another format.
    """

    def __init__(self, path: Path, source: IO[bytes]) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(source)
            entry = self._zip.getinfo(MANIFEST)
            # Before it is read, because a few kB of a zip can unpack to gigabytes
            if entry.file_size > _LARGEST_MANIFEST:
                raise BackupError(f"{path} was altered: its {MANIFEST} is too large; {_ANOTHER}")
            self.manifest = Manifest.model_validate_json(self._zip.read(entry))
        except KeyError:
            raise BackupError(f"{path} is not a backup: it has no {MANIFEST}") from None
        except ValidationError as error:
            raise BackupError(
                f"{path}: {MANIFEST} is damaged, or of another version of fedsilo "
                f"({error.errors()[0]['msg']}): restore it by the version that made it"
            ) from None
        except _BROKEN as error:
            raise BackupError(
                f"{path} is not a whole backup ({error}): it was truncated or damaged; {_ANOTHER}"
            ) from None
        fault = self._find_damage()
        if fault:
            raise BackupError(f"{path} was altered or damaged: {fault}; {_ANOTHER}")

    def _find_damage(self) -> str:
        """Describe the first fault of the backup's files, or return an empty string.

        The names in the manifest are compared with the names in the zip first. Then each file is
        checked in the manifest's order. A file is faulty if its name leads out of the folder, it
        cannot be read, or its SHA-256 differs from the manifest's. The passphrase is not needed.
        """
        listed = {_FILES + name for name in self.manifest.files}
        present = {entry.filename for entry in self._zip.infolist()} - {MANIFEST}
        # An extra file would be harmless, but nobody made such a backup
        differing = sorted(listed ^ present)
        if differing:
            return f"{differing[0]} is in only one of the manifest and the zip"
        for name, file in self.manifest.files.items():
            # The names are checked before the seal, so they may be anybody's
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                return f"the name '{name}' leads out of the deployment"
            try:
                if self._digest(name) != file.sha256:
                    return f"{name} does not have the SHA-256 that the manifest names"
            except _BROKEN:
                return f"{name} cannot be read"
        return ""

    def _digest(self, name: str) -> str:
        with self._zip.open(_FILES + name) as entry:
            return hashlib.file_digest(entry, "sha256").hexdigest()  # type: ignore[arg-type]

    def unlock(self, passphrase: str) -> Keys:
        """Derive the backup's keys from the passphrase, and check them against the manifest's seal.

        The seal is an HMAC of the manifest. The keys are right if they give the same HMAC.

        Raises:
            BackupError: the passphrase is not the backup's, or the manifest was altered.
        """
        keys = derive_keys(passphrase, self.manifest.salt, self.manifest.cost)
        if not hmac.compare_digest(self.manifest.compute_seal(keys.manifest), self.manifest.seal):
            raise BackupError(
                f"{self.path} does not open: the passphrase is not the backup's, or {MANIFEST} was "
                "altered; give the passphrase that the backup was made with"
            )
        return keys

    def extract(self, keys: Keys, folder: Path) -> None:
        """Decrypt all files of the backup into an existing folder.

        Only the owner can read the files and the folders below ``folder``.

        Args:
            keys: the keys that ``unlock`` returned.
            folder: the folder, in which none of the files may exist yet.

        Raises:
            BackupError: a file does not decrypt, so it was altered together with its SHA-256.
            OSError: a file exists already or cannot be written.
        """
        for number, name in enumerate(self.manifest.files):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = open_regular(path, _NEW, 0o600)
            with self._zip.open(_FILES + name) as entry, open(handle, "wb") as target:
                self._decrypt(keys, number, name, entry, target)
        for path in folder.rglob("*"):
            if path.is_dir():
                path.chmod(0o700)

    def _decrypt(
        self, keys: Keys, number: int, name: str, entry: IO[bytes], target: IO[bytes]
    ) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        cipher = AESGCM(keys.files)
        try:
            for chunk, (piece, is_last) in enumerate(_chunks(entry, _CHUNK + _TAG)):
                nonce = _nonce(number, chunk, is_last)
                target.write(cipher.decrypt(nonce, piece, name.encode()))
        except InvalidTag:
            raise BackupError(f"{self.path} was altered: {name} does not decrypt") from None


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_ANOTHER = "copy it again, or use another backup"
