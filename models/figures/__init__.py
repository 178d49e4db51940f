"""What the pictures of all rooms have in common: one palette, one heat map."""
