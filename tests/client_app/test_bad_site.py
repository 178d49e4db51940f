"""What a hospital's engineer, and the server, are told of a site that is set up wrongly."""

import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsilo.client_app.app import app
from fedsilo.core.messages import CONFIG, HELLO
from fedsilo.core.versions import FEDSILO
from fedsilo.server_app.config.settings import resolve

Node = Callable[..., Context]


@pytest.fixture
def own_log() -> Iterator[io.StringIO]:
    """Return what goes into the site's own log."""
    written = io.StringIO()
    handler, log = logging.StreamHandler(written), logging.getLogger("flwr")
    log.addHandler(handler)
    yield written
    log.removeHandler(handler)


def hello(**said: str) -> Message:
    return Message(RecordDict({CONFIG: ConfigRecord({"hello": True, **said})}), 1001, HELLO)


def node_with(folder: Path, dataset: str, site: str, cache: Path) -> Context:
    node: dict[str, Any] = {"site": site, "data-dir": str(folder), "cache-dir": str(cache)}
    node["trust"] = "server"
    return Context(1, 1001, node, RecordDict(), resolve({"dataset": dataset}).as_mapping())


def reason_of(reply: Message) -> str:
    assert reply.has_error()
    return str(reply.error.reason)


@pytest.mark.parametrize(
    ("dataset", "site", "missing"),
    [
        ("fmnist", "s1a", "train-images-idx3-ubyte.gz is missing in "),
        ("heart", "va", "processed.va.data is missing in "),
        ("endovascular", "north", "endovascular.yaml cannot be read: "),
        ("table", "north", "schema.yaml cannot be read: "),
        ("isic2019", "vidir_modern", "has no folder of images"),
    ],
)
@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("gone", "the node config's 'data-dir' cannot be read: No such file or directory"),
        ("empty", "the node config's 'data-dir' is empty"),
        ("file", "the node config's 'data-dir' cannot be read: Not a directory"),
    ],
)
def test_a_data_directory_of_no_use_is_one_line_at_the_site_and_at_the_server(
    tmp_path: Path,
    own_log: io.StringIO,
    dataset: str,
    site: str,
    missing: str,
    folder: str,
    said: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    told = reason_of(app(hello(), node_with(tmp_path / folder, dataset, site, tmp_path / "cache")))
    assert told.startswith(f"{site}: ")
    assert missing in told
    assert told.endswith(said)
    assert own_log.getvalue().replace(str(tmp_path / folder), "(data-dir)") == f"fedsilo: {told}\n"


@pytest.mark.parametrize("real", [True, False])
def test_a_directory_that_may_not_be_read_is_one_line_without_a_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_log: io.StringIO, real: bool
) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "/data/mueller-1951.png")

    (tmp_path / "one").touch()
    monkeypatch.setattr("fedsilo.client_app.opening.load_silo", fail)
    node = node_with(tmp_path, "heart", "va", tmp_path / "cache")
    if not real:
        node.node_config = {"partition-id": 0}
    told = reason_of(app(hello(), node))
    why = "va: the data cannot be opened (Permission denied): the site's own log names the file"
    hidden = "PermissionError: Permission denied (its text is in the site's own log)"
    assert told == (why if real else hidden)
    assert "mueller" in own_log.getvalue()


def test_a_data_set_without_files_needs_no_data_directory(tmp_path: Path, context: Node) -> None:
    node = {"site": "s1a", "data-dir": str(tmp_path / "gone"), "trust": "server"}
    assert app(hello(), context(node)).has_content()
    told = reason_of(app(hello(), context(node | {"site": "s9"})))
    assert told.startswith("s9: there is no silo 's9'")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"fedsilo-version": "9.0"}, f"s1a: the site runs fedsilo {FEDSILO}, but the server 9.0: "),
        ({"flower-version": "9.0"}, "s1a: the site runs Flower 1."),
    ],
)
def test_a_server_of_another_version_is_refused_by_the_site(
    context: Node, own_log: io.StringIO, said: dict[str, str], told: str
) -> None:
    reason = reason_of(app(hello(**said), context({"site": "s1a", "trust": "server"})))
    assert reason.startswith(told)
    assert reason in own_log.getvalue()
