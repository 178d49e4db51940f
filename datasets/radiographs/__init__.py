"""X-ray images of any depth, with masks where there are some.

Stands on images and partition; its made-up twins are in synthetic.
"""
