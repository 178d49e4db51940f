"""Named equations that several papers share: tensors in, tensors out.

Stands on the contract; knows no network and no method.
"""
