"""The settings of a run from every source, and the plugins and files that it names.

Nothing here knows a run or a method by name.
"""
