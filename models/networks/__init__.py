"""What is trained: networks by name, and the parts that papers add to them."""
