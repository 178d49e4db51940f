"""X-ray images of any depth, with masks where there are some.

It imports images and partition; its synthetic counterparts are in synthetic.
"""
