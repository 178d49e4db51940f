"""What a server can make a real hospital read: weights by a plain name, of its cache, no more."""

from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict

from fedsilo.client_app.app import app
from fedsilo.client_app.site.identity import site_settings
from fedsilo.core.errors import SettingError
from fedsilo.core.messages import HELLO
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.config.settings import resolve


def _node(tmp_path: Path, weights: str, **node: Value) -> Context:
    values: dict[str, Value] = {
        "method": "fedevprompt",
        "dataset": "dermoscopy-phantom",
        "network.name": "vit",
        "vit.backbone-weights": weights,
        "data.cache-dir": "/etc",
        "data.dir": "/etc",
    }
    real = {
        "site": "vienna_dias",
        "state-dir": str(tmp_path / "state"),
        "trust": "server",
        "cache-dir": str(tmp_path / "cache"),
        "data-dir": str(tmp_path / "data"),
    }
    return Context(1, 1001, {**real, **node}, RecordDict(), resolve(values).as_mapping())


@pytest.mark.parametrize(
    "named", ["/etc/passwd", "../secret.safetensors", "a/b.safetensors", "x.pt"]
)
def test_a_server_cannot_name_a_path_at_a_hospital(tmp_path: Path, named: str) -> None:
    with pytest.raises(SettingError, match=r"is not a plain name of a \.safetensors file"):
        site_settings(_node(tmp_path, named))
    reply = app(Message(RecordDict(), 1001, HELLO), _node(tmp_path, named))
    assert "is not a plain name" in (reply.error.reason or "")


def test_a_plain_name_is_looked_for_in_the_cache_only(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "vit.safetensors").write_bytes(b"a patient's file")
    node = _node(tmp_path, "vit.safetensors", **{"allow-embeddings": True})
    found = site_settings(node).backbone_weights
    assert found == str(tmp_path / "cache" / "backbones" / "vit.safetensors")
    reply = app(Message(RecordDict(), 1001, HELLO), node)
    assert "there is no" in (reply.error.reason or "")


def test_a_hospital_names_any_file_of_its_own(tmp_path: Path) -> None:
    own = str(tmp_path / "elsewhere" / "vit.pt")
    context = _node(tmp_path, "/etc/passwd", **{"backbone-weights": own})
    assert site_settings(context).backbone_weights == own


@pytest.mark.parametrize("named", ["random", "timm", ""])
def test_words_that_name_no_file_stay(tmp_path: Path, named: str) -> None:
    assert site_settings(_node(tmp_path, named)).backbone_weights == named


@pytest.mark.parametrize("name", ["hf-hub:owner/repo", "local-dir:/etc", "../vit"])
def test_a_backbone_is_a_name_and_no_address(name: str) -> None:
    with pytest.raises(SettingError, match="a name of timm, without a path or an address"):
        resolve({"method": "fedavg", "network.name": "vit", "vit.backbone": name})
