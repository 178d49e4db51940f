"""Backbone weights: from files, and from timm over a Hugging Face hub that stands on this machine.

Nothing here reaches the network: the hub is a server of this process, and a subprocess of its own
asks it, because huggingface_hub reads its endpoint when it is imported.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
import timm
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from fedsilo.core.errors import SettingError
from fedsilo.core.files.state_files import save_state
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.weights.backbones import (
    backbone_digest,
    load_backbone,
    refuse_seen_images,
    weights_file,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.prompted_vit import PromptedViT
from tests.support.errors import refuses
from tests.support.tiny import VIT_FIELDS

SIZES: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4}
SMALL = VIT_FIELDS | {"backbone": "vit_tiny_patch16_224"}
COLOUR = NetworkShape((3, 16, 16), 4)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def common(cache: Path) -> Callable[..., CommonSettings]:
    def build(weights: Path | str, **changes: Any) -> CommonSettings:
        own = {"backbone_weights": str(weights), "cache_dir": str(cache)}
        return CommonSettings(**{**SMALL, **own, **changes})

    return build


def trained(seed: int = 5, size: int = 16, channels: int = 3, **changes: Any) -> dict[str, Tensor]:
    """Return a timm state dict, with a head, whose every value is drawn."""
    vit = timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=7,
        img_size=size,
        in_chans=channels,
        **{**SIZES, **changes},
    )
    draw = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=draw) for n, t in vit.state_dict().items()}


def filled(settings: CommonSettings, task: NetworkShape = COLOUR) -> PromptedViT:
    network = cast(PromptedViT, build_classifier(settings, task))
    load_backbone(network, settings)
    return network


def refusal(settings: CommonSettings, task: NetworkShape = COLOUR) -> str:
    with pytest.raises(SettingError) as caught:
        filled(settings, task)
    return str(caught.value)


def assert_holds(network: PromptedViT, state: dict[str, Tensor], *but: str) -> None:
    found = network.vit.state_dict()
    assert set(found) == {name for name in state if not name.startswith("head")}
    for name, tensor in found.items():
        assert name in but or torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_files_weights_are_those_of_the_vit_and_its_head_is_not(
    common: Callable[..., CommonSettings], tmp_path: Path, suffix: str
) -> None:
    state, path = trained(), tmp_path / f"vit.{suffix}"
    if suffix == "pth":
        torch.save({"state_dict": state}, path)
    else:
        save_file(state, path)
    network = filled(common(path))
    assert_holds(network, state)
    assert "head.weight" in state
    assert network.head[1].weight.shape == (4, 16)  # the run's own
    assert not any(p.requires_grad for p in network.vit.parameters())
    assert all(prompts.requires_grad for prompts in network.prompts.values())
    reference = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=16, **SIZES)
    reference.eval().load_state_dict(state)
    with torch.no_grad():
        images = torch.rand(2, 3, 16, 16)
        bare = filled(common(path, prompt_sets="none")).eval()
        expected = reference.forward_features(images)[:, :1]
        assert torch.allclose(bare.encode(images), expected, atol=1e-4)


def test_a_trained_backbone_starts_from_the_file_and_keeps_its_gradients(
    common: Callable[..., CommonSettings], tmp_path: Path
) -> None:
    save_file(trained(), tmp_path / "vit.safetensors")
    network = filled(common(tmp_path / "vit.safetensors", train_backbone=True))
    assert_holds(network, trained())
    assert all(p.requires_grad for p in network.vit.parameters())


def test_position_embeddings_are_resampled_to_another_image_size(
    common: Callable[..., CommonSettings], tmp_path: Path
) -> None:
    state, path = trained(size=16), tmp_path / "vit.safetensors"
    # a plane over the 4x4 patches stays one over 8x8: the value at the middle is kept
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    state["pos_embed"][0, 1:] = (rows + 10 * columns).reshape(16, 1)
    save_file(state, path)
    network = filled(common(path), NetworkShape((3, 32, 32), 4))
    assert_holds(network, state, "pos_embed")
    found = network.vit.pos_embed
    assert found.shape == (1, 65, 16)
    assert torch.equal(found[0, 0], state["pos_embed"][0, 0])  # the class token's own
    grid = found[0, 1:].reshape(8, 8, 16)
    assert grid[3:5, 3:5].mean().item() == pytest.approx(1.5 + 15, abs=1e-3)
    assert (grid.diff(dim=0)[1:-1] > 0.2).all()
    assert (grid.diff(dim=1)[:, 1:-1] > 2).all()


def test_patches_of_another_size_are_resampled(
    common: Callable[..., CommonSettings], tmp_path: Path
) -> None:
    state = trained(size=32, patch_size=8)  # 4x4 patches, as here
    save_file(state, tmp_path / "vit.safetensors")
    network = filled(common(tmp_path / "vit.safetensors"))
    assert_holds(network, state, "patch_embed.proj.weight")
    assert network.vit.patch_embed.proj.weight.shape == (16, 3, 4, 4)


def test_grey_images_take_the_sum_of_a_colour_backbones_channels(
    common: Callable[..., CommonSettings], tmp_path: Path
) -> None:
    state = trained()
    save_file(state, tmp_path / "vit.safetensors")
    network = filled(common(tmp_path / "vit.safetensors"), NetworkShape((1, 16, 16), 4))
    assert_holds(network, state, "patch_embed.proj.weight")
    summed = state["patch_embed.proj.weight"].sum(dim=1, keepdim=True)
    assert torch.allclose(network.vit.patch_embed.proj.weight, summed)
    grey = torch.rand(2, 1, 16, 16) * 2 - 1
    colour = filled(common(tmp_path / "vit.safetensors"))
    with torch.no_grad():
        seen = colour.eval().encode(grey.expand(-1, 3, -1, -1))
        network.load_state_dict(
            {n: t for n, t in colour.state_dict().items() if "patch_embed.proj.weight" not in n},
            strict=False,
        )
        assert torch.allclose(network.eval().encode(grey), seen, atol=1e-3)


def altered(state: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {n: t for n, t in {**state, **named}.items() if t is not None}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (lambda: trained(embed_dim=32), r"'.*' is \(.*32.*\), not \(.*16.*\)"),
        (lambda: trained(depth=3), r"0 arrays are missing \(\), 12 too many \(blocks.2."),
        (lambda: trained(depth=1), r"12 arrays are missing \(blocks.1.attn.proj.bias, "),
        (lambda: trained(channels=2), r"'patch_embed.proj.weight' is \(16, 2, 4, 4\), not \(16, 3"),
        (lambda: trained(qk_norm=True), r"8 too many \(blocks.0.attn.k_norm.bias"),
        (lambda: altered(trained(), cls_token=None), r"1 arrays are missing \(cls_token\), 0 too"),
        (
            lambda: timm.create_model("resnet10t", num_classes=0).state_dict(),
            r"arrays are missing \(blocks.0.attn.proj.bias",
        ),
    ],
)
def test_weights_of_another_architecture_are_refused(
    common: Callable[..., CommonSettings],
    tmp_path: Path,
    state: Callable[[], dict[str, Tensor]],
    said: str,
) -> None:
    path = tmp_path / "vit.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in state().items()}, path)
    told = refusal(common(path))
    assert f"'vit.backbone-weights': {path} is of another architecture than the run's ViT: " in told
    assert re.search(said, told), told
    assert "set 'vit.backbone' and 'vit.backbone-...'" in told


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(
    common: Callable[..., CommonSettings], tmp_path: Path, bad: float
) -> None:
    state, path = trained(), tmp_path / "vit.safetensors"
    state["blocks.1.mlp.fc1.weight"][3, 2] = bad
    save_file(state, path)
    assert refusal(common(path)).endswith(
        f"{path} is not finite, as in a run that diverged: name other weights"
    )


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("kept", [0, 7, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_refused(
    common: Callable[..., CommonSettings], tmp_path: Path, suffix: str, kept: float
) -> None:
    path = tmp_path / f"vit.{suffix}"
    if suffix == "pth":
        torch.save(trained(), path)
        whole = path.read_bytes()
    else:
        whole = save(trained())
    path.write_bytes(whole[: int(kept if kept >= 1 else kept * len(whole))])
    told = refusal(common(path))
    assert f"'vit.backbone-weights': {path} is truncated or not a weights file (" in told


def test_a_file_of_something_else_is_refused(
    common: Callable[..., CommonSettings], tmp_path: Path
) -> None:
    for name, text in (("vit.safetensors", b"\xff" * 100), ("vit.pth", b"no weights\n")):
        (tmp_path / name).write_bytes(text)
        assert "is truncated or not a weights file" in refusal(common(tmp_path / name))


class _Opens:
    """Opens a file for writing when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_a_file_that_would_run_code_is_refused_and_runs_none(
    common: Callable[..., CommonSettings], tmp_path: Path
) -> None:
    torch.save({"state_dict": trained(), "more": _Opens(tmp_path / "ran")}, tmp_path / "vit.pth")
    assert "is truncated or not a weights file" in refusal(common(tmp_path / "vit.pth"))
    assert not (tmp_path / "ran").exists()


def test_an_empty_setting_says_what_can_stand_there(common: Callable[..., CommonSettings]) -> None:
    told = refusal(common(""))
    assert told.startswith("network 'vit' needs weights for its backbone: set 'vit.backbone-w")
    for way in ("safetensors", "'timm'", "'random'", "'fedsilo pretrain'"):
        assert way in told
    with pytest.raises(SettingError, match="needs weights"):
        backbone_digest(common(""))


def test_a_missing_file_is_named_with_the_folders_looked_in(
    common: Callable[..., CommonSettings], tmp_path: Path, cache: Path
) -> None:
    assert f"there is no {tmp_path / 'absent.pth'}: give" in refusal(
        common(tmp_path / "absent.pth")
    )
    told = refusal(common("absent.pth", data_dir=str(tmp_path / "data")))
    assert f"'vit.backbone-weights' is 'absent.pth', but there is no {cache}/backbones/ab" in told
    assert f" or {tmp_path}/data/absent.pth: give an absolute path" in told
    with pytest.raises(SettingError, match="there is no"):
        backbone_digest(common("absent.pth"))


def test_a_relative_name_is_found_in_the_caches_backbones_and_in_the_data_folder(
    common: Callable[..., CommonSettings], tmp_path: Path, cache: Path
) -> None:
    data = tmp_path / "data"
    settings = common("own/vit.safetensors", data_dir=str(data))
    in_data, in_cache = data / "own/vit.safetensors", cache / "backbones/own/vit.safetensors"
    for seed, path in ((1, in_data), (2, in_cache)):
        path.parent.mkdir(parents=True)
        save_file(trained(seed), path)
        assert weights_file(settings) == path  # once it is there, the cache's is taken first
        assert_holds(filled(settings), trained(seed))


@pytest.mark.parametrize(
    ("named", "origin"),
    [
        ("random", "random"),
        ("timm", f"timm {timm.__version__}, timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
    ],
)
def test_random_and_timm_weights_are_no_file(
    common: Callable[..., CommonSettings], named: str, origin: str
) -> None:
    assert weights_file(common(named)) is None
    assert backbone_digest(common(named)) == f"vit_tiny_patch16_224, {origin}"


def test_random_weights_are_those_of_the_seed(common: Callable[..., CommonSettings]) -> None:
    first, again, other = (filled(common("random", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first.vit.cls_token, again.vit.cls_token)
    weight = "blocks.1.attn.qkv.weight"
    assert torch.equal(first.vit.state_dict()[weight], again.vit.state_dict()[weight])
    assert not torch.equal(first.vit.state_dict()[weight], other.vit.state_dict()[weight])


def test_a_network_without_a_vit_needs_no_weights() -> None:
    network = build_classifier(CommonSettings(width=1), COLOUR)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    load_backbone(network, CommonSettings(width=1))
    assert all(torch.equal(t, before[n]) for n, t in network.state_dict().items())


def test_the_digest_is_that_of_the_files_content(
    common: Callable[..., CommonSettings], tmp_path: Path
) -> None:
    first, copy, other = (tmp_path / f"{name}.safetensors" for name in ("first", "copy", "other"))
    for path, seed in ((first, 1), (copy, 1), (other, 2)):
        save_file(trained(seed), path)
    digests = [backbone_digest(common(path)) for path in (first, copy, other)]
    assert digests[0] == hashlib.sha256(first.read_bytes()).hexdigest() == digests[1]
    assert digests[2] != digests[0]


SERVED = {"test_vit": "whole", "vit_tiny_patch16_224": "absent", "deit_tiny_patch16_224": "bare"}
_ASKS = """
import json, sys, time
from safetensors.torch import save_file
from fedsilo.datasets.weights.backbones import load_backbone
from fedsilo.core.errors import SettingError
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.build import build_classifier
from fedsilo.core.settings.common_settings import CommonSettings

told = {}
for name in sys.argv[2:]:
    settings = CommonSettings(network="vit", backbone=name, backbone_weights="timm")
    network = build_classifier(settings, NetworkShape((3, 32, 32), 4))
    began = time.monotonic()
    try:
        load_backbone(network, settings)
        save_file(network.vit.state_dict(), sys.argv[1])
        error = ""
    except SettingError as refused:
        error = str(refused)
    told[name] = [error, time.monotonic() - began]
print(json.dumps(told))
"""


def served_state() -> dict[str, Tensor]:
    vit = timm.create_model("test_vit", num_classes=1000)
    draw = torch.Generator().manual_seed(11)
    return {n: torch.randn(t.shape, generator=draw) for n, t in vit.state_dict().items()}


class _Hub(BaseHTTPRequestHandler):
    """A hub that has test_vit's weights; of other models it has none, and says so in two ways."""

    content = b""
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        parts = self.path.split("?")[0].strip("/").split("/")
        repository = parts[1].split(".")[0] if len(parts) > 1 else ""
        kind = SERVED.get(repository, "bare")
        if kind == "whole" and parts[2:] == ["resolve", "main", "model.safetensors"]:
            self._send(200, {"ETag": f'"{hashlib.sha256(self.content).hexdigest()}"'}, body)
        else:
            code = {"X-Error-Code": "EntryNotFound"} if kind == "absent" else {}
            self._send(404, code, body=False)

    def _send(self, status: int, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        length = len(self.content) if status == 200 else 0
        known = {"Content-Length": str(length), "X-Repo-Commit": "0" * 40}
        for name, value in {**known, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(self.content)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ask timm, in a process that knows no hub but this one, for each model of ``SERVED``."""
    home = tmp_path_factory.mktemp("hub")
    _Hub.content, _Hub.asked = save(served_state()), []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    around = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    around |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "3",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        around.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", _ASKS, str(home / "loaded.safetensors"), *SERVED],
        capture_output=True,
        text=True,
        env=around,
        timeout=120,
        check=False,
    )
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    return {
        "answers": answers,
        "loaded": load_file(home / "loaded.safetensors"),
        "asked": list(_Hub.asked),
    }


def test_timms_weights_are_those_that_the_hub_serves(told: dict[str, Any]) -> None:
    assert told["answers"]["test_vit"][0] == ""
    path = "/timm/test_vit.r160_in1k/resolve/main/model.safetensors"
    assert {f"HEAD {path}", f"GET {path}"} <= set(told["asked"])
    expected = {n: t for n, t in served_state().items() if not n.startswith("head")}
    assert told["loaded"].keys() == expected.keys()
    for name, tensor in told["loaded"].items():
        if name == "pos_embed":  # 160 pixels there, 32 here
            assert tensor.shape == (1, 1 + 2 * 2, 64)
            assert torch.equal(tensor[:, 0], expected[name][:, 0])
        else:
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_patch16_224"])
def test_weights_that_the_hub_does_not_have_are_told_of_without_a_wait(
    told: dict[str, Any], name: str
) -> None:
    error, seconds = told["answers"][name]
    assert error.startswith(f"cannot download timm's weights for '{name}' (")
    assert error.endswith("check the network, or name a file in 'vit.backbone-weights'")
    assert seconds < 20


def test_weights_that_the_hub_says_it_has_not_are_told_of_as_such(told: dict[str, Any]) -> None:
    assert "(EntryNotFoundError: 404" in told["answers"]["vit_tiny_patch16_224"][0].replace(
        "RemoteE", "E"
    )


def test_a_name_without_weights_is_told_of(common: Callable[..., CommonSettings]) -> None:
    told = refusal(common("timm", backbone="vit_small_patch16_36x1_224"))
    assert "timm's weights for 'vit_small_patch16_36x1_224' (RuntimeError: No" in told


def pretrained(path: Path, share: float, dataset: str = "dermoscopy-phantom") -> Path:
    """Write weights as ``fedsilo pretrain`` does, trained on a public part of ``share``."""
    arrays = {name: tensor.numpy() for name, tensor in trained().items()}
    save_state(path, arrays, {"data": [dataset, share, 100]})
    return path


@pytest.mark.parametrize(
    ("dataset", "share", "fits"),
    [
        ("dermoscopy-phantom", 0.4, True),
        ("dermoscopy-phantom", 0.5, True),
        ("dermoscopy-phantom", 0.3, False),
        ("dermoscopy-phantom", 0.0, False),
        ("isic2019", 0.0, True),
    ],
)
def test_weights_that_have_seen_images_of_the_silos_are_refused(
    common: Callable[..., CommonSettings], tmp_path: Path, dataset: str, share: float, fits: bool
) -> None:
    path = pretrained(tmp_path / "vit.safetensors", 0.4)
    settings = common(path, dataset=dataset, public_share=share)
    if fits:
        refuse_seen_images(path, settings)
        return
    with refuses(SettingError, "0.4", "split.public-share", f"{share:g}"):
        refuse_seen_images(path, settings)
    with pytest.raises(SettingError, match="the sites would have images that it has seen"):
        load_backbone(build_classifier(settings, COLOUR), settings)


def test_own_weights_that_were_altered_are_refused(
    common: Callable[..., CommonSettings], tmp_path: Path
) -> None:
    path = pretrained(tmp_path / "vit.safetensors", 0.0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    settings = common(path)
    with pytest.raises(SettingError, match="was altered: its checksum does not match"):
        load_backbone(build_classifier(settings, COLOUR), settings)
