"""The functions of the commands. ``table`` lists them, and ``import fedsilo`` offers them."""
