"""Silos: what each hospital holds, as tensors with a train, val and test split. No flwr here."""
