"""X-ray images of any depth, with masks where there are some."""
