"""Named equations that several papers share: tensors in, tensors out."""
