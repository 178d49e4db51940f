"""A network of your own: change it, and run 'fedsilo simulate own'."""

from math import prod

from torch import nn


def build(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a network that maps inputs (batch, *input_shape) to logits (batch, classes).

    This example flattens the inputs. It has a hidden layer of 64 units, ReLU and a dropout of 0.1.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(input_shape), 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, classes),
    )
