"""One paper, one file: its equations, its settings, and where each equation is computed."""
