"""Named equations that several papers share: tensors in, tensors out.

Imports the contract only, no network and no method.
"""
