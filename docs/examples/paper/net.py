"""A network for images and rows."""

from math import prod

from torch import nn


def build(input_shape, classes):
    """Return a perceptron of two layers for images or rows."""
    inputs = prod(input_shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, classes))
