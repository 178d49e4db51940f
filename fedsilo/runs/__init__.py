"""What one does with finished runs: compare, draw, report, predict, export. The core needs none."""
