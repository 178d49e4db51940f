"""Draws pictures of runs: learning curves, labels, topology, a method's own documents."""
