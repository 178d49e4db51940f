"""What one hospital holds: tensors with a train, val and test split."""
