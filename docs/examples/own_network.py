"""A network of your own in a run of FedAvg on digits: python own_network.py."""

from math import prod

from torch import nn

from fedsilo import simulate


def build(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a perceptron of two layers for inputs (batch, *input_shape)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(input_shape), 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


if __name__ == "__main__":
    settings = {"network.name": "own_network:build", "rounds": 3}
    run = simulate("fedavg-digits", plugin=__file__, settings=settings)
    print(f"accuracy on test data: {run.summary['mean']['accuracy']:.3f}")
