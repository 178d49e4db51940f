"""The network of the benchmark's larger images: two convolutions, in place of the nine of 'conv'.

On one core, a step of 'conv' on 32 images of 28x28 pixels takes about 13 ms, and a step of this
network about 3 ms. So the benchmark can afford the rounds after which FedAvg is near its plateau.

A change of this file makes all runs of these images different runs: the benchmark begins them anew.
"""

from torch import nn

from fedsilo.models.networks.site_network import TokenClassifier

WIDTHS = (16, 32)  # channels of the two convolutions
HIDDEN = 64  # units of the head's hidden layer
STRIDE = 4  # of both convolutions together
DROPOUT = 0.1  # for all methods, because UEFL's Monte Carlo passes need dropout


def build(input_shape: tuple[int, ...], classes: int) -> TokenClassifier:
    """Build two 5x5 convolutions with stride 2 and batch norm, and a head with a hidden layer.

    Args:
        input_shape: (channels, height, width); the map that the head flattens is
            (32, height / 4, width / 4), rounded up.
        classes: number of logits.
    """
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for wide in WIDTHS:
        # Batch norm subtracts the mean, so a bias before it would have no effect
        convolution = nn.Conv2d(channels, wide, 5, stride=2, padding=2, bias=False)
        layers += [convolution, nn.BatchNorm2d(wide), nn.ReLU()]
        channels = wide
    tokens = -(-height // STRIDE) * -(-width // STRIDE)
    head = nn.Sequential(
        nn.Dropout(DROPOUT),
        nn.Linear(tokens * channels, HIDDEN),
        nn.GELU(),
        nn.Dropout(DROPOUT),
        nn.Linear(HIDDEN, classes),
    )
    return TokenClassifier(nn.Sequential(*layers), head, tokens=tokens, channels=channels)
