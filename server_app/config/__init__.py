"""Settings from every source, and the experiments of simulation.yaml.

Nothing here knows a run or a method by name.
"""
