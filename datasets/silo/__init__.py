"""Silos: a hospital's samples as tensors with train, val and test split."""
