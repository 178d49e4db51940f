"""Settings from every source, and the experiments of simulation.yaml.

Knows no run and no method by name.
"""
