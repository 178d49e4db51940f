"""Pretrained weights at rest, and what they have seen."""
