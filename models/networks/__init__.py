"""Networks by name, and the parts that papers add to networks."""
