import dataclasses
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedsilo.core.errors import DataError
from fedsilo.datasets.downloads.download import fetch
from fedsilo.datasets.downloads.public_files import PublicFiles, RemoteFile, public_data
from tests.support.archives import write_zip
from tests.support.errors import refuses

CONTENT = {"images.gz": b"some images" * 1000, "labels.gz": b"some labels"}


@dataclass
class Server:
    """A public source on this machine: what it holds, what it was asked for, what it breaks off."""

    url: str = ""
    content: dict[str, bytes] = field(default_factory=lambda: dict(CONTENT))
    asked: list[str] = field(default_factory=list)
    breaks_off: bool = False


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[-1]
            state.asked.append(name)
            if name not in state.content:
                self.send_error(404)
                return
            body = state.content[name]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body) + 10 * state.breaks_off))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{http.server_port}/data/"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    http.shutdown()
    http.server_close()
    thread.join(timeout=10)


@pytest.fixture
def source(server: Server) -> PublicFiles:
    files = tuple(
        RemoteFile(name, hashlib.md5(body, usedforsecurity=False).hexdigest())
        for name, body in CONTENT.items()
    )
    return dataclasses.replace(public_data()["mnist"], files=files, url=server.url)


def test_files_come_into_the_folder_of_their_source_with_a_line_each(
    server: Server, source: PublicFiles, tmp_path: Path
) -> None:
    lines = list(fetch(source, tmp_path / "new"))
    found = {path.name: path.read_bytes() for path in (tmp_path / "new" / "mnist").iterdir()}
    assert found == CONTENT
    assert server.asked == ["images.gz", "labels.gz"]
    assert lines[0] == f"mnist from {server.url}; licence: CC BY-SA 3.0"
    assert lines[1] == f"{tmp_path}/new/mnist/images.gz: 11,000 bytes, checksum right"


def test_files_that_are_there_already_are_not_asked_for_again(
    server: Server, source: PublicFiles, tmp_path: Path
) -> None:
    list(fetch(source, tmp_path))
    server.asked.clear()
    lines = list(fetch(source, tmp_path))
    assert server.asked == []
    assert all("there already" in line for line in lines[1:])


def test_content_with_another_checksum_is_refused_and_never_written(
    server: Server, source: PublicFiles, tmp_path: Path
) -> None:
    server.content["images.gz"] = b"something else"
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "images.gz").write_bytes(b"old")
    wrong = hashlib.md5(b"something else", usedforsecurity=False).hexdigest()
    with pytest.raises(
        DataError, match=f"images.gz from {server.url} must have MD5 .*, but has {wrong}"
    ):
        list(fetch(source, tmp_path))
    assert [path.name for path in (tmp_path / "mnist").iterdir()] == ["images.gz"]
    assert (tmp_path / "mnist" / "images.gz").read_bytes() == b"old"


def test_another_base_url_is_asked_in_place_of_the_public_one(
    server: Server, source: PublicFiles, tmp_path: Path
) -> None:
    elsewhere = dataclasses.replace(source, url="http://127.0.0.1:1/")
    list(fetch(elsewhere, tmp_path, base_url=server.url.rstrip("/")))
    assert (tmp_path / "mnist" / "images.gz").read_bytes() == CONTENT["images.gz"]


def test_a_file_that_the_server_lacks_is_refused_by_its_address(
    server: Server, source: PublicFiles, tmp_path: Path
) -> None:
    del server.content["labels.gz"]
    with refuses(DataError, f"{server.url}labels.gz"):
        list(fetch(source, tmp_path))
    assert not (tmp_path / "mnist" / "labels.gz").exists()


def test_a_download_that_breaks_off_is_refused(
    server: Server, source: PublicFiles, tmp_path: Path
) -> None:
    server.breaks_off = True
    with refuses(DataError, "images.gz"):
        list(fetch(source, tmp_path))


def test_without_a_server_only_the_innermost_reason_is_told(
    source: PublicFiles, tmp_path: Path
) -> None:
    with refuses(DataError, "images.gz"):
        list(fetch(source, tmp_path, base_url="http://127.0.0.1:1/"))


def test_an_address_without_a_scheme_is_refused(source: PublicFiles, tmp_path: Path) -> None:
    with refuses(DataError, "example/images.gz"):
        list(fetch(source, tmp_path, base_url="example/"))


def test_a_source_without_files_brings_nothing_and_asks_nobody(tmp_path: Path) -> None:
    assert list(fetch(public_data()["digits"], tmp_path / "new")) == []
    assert not (tmp_path / "new").exists()


def _packed(server: Server, name: str, content: bytes) -> PublicFiles:
    """Return GTSRB's source with one archive, which the server holds."""
    server.content[name] = content
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    file = RemoteFile(name, md5, len(content), unpacked="GTSRB/Final_Test")
    return dataclasses.replace(public_data()["gtsrb"], files=(file,), url=server.url)


def test_an_archive_is_unpacked_where_its_data_set_wants_it_and_once(
    server: Server, tmp_path: Path
) -> None:
    archive = write_zip(tmp_path / "archive", {"GT-final_test.csv": b"Filename;ClassId"})
    packed = _packed(server, "GT.zip", archive.read_bytes())
    lines = list(fetch(packed, tmp_path / "data"))
    folder = tmp_path / "data" / "GTSRB" / "Final_Test"
    assert (folder / "GT-final_test.csv").read_bytes() == b"Filename;ClassId"
    assert lines[0].endswith(
        f"{archive.stat().st_size:,} bytes; licence: for research; none is stated"
    )
    assert lines[2].endswith(f"GTSRB/GT.zip: 1 files unpacked into {folder}")
    server.asked.clear()
    assert list(fetch(packed, tmp_path / "data"))[2].endswith(f"unpacked already into {folder}")
    (folder / "GT-final_test.csv").unlink()
    list(fetch(packed, tmp_path / "data"))
    assert (folder / "GT-final_test.csv").exists()
    assert server.asked == []


def test_an_archive_with_another_checksum_is_never_unpacked(server: Server, tmp_path: Path) -> None:
    archive = write_zip(tmp_path / "archive", {"GT-final_test.csv": b"Filename;ClassId"})
    packed = _packed(server, "GT.zip", archive.read_bytes())
    server.content["GT.zip"] = write_zip(tmp_path / "other", {"x": b"y"}).read_bytes()
    with refuses(DataError, "GT.zip"):
        list(fetch(packed, tmp_path / "data"))
    assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == []
