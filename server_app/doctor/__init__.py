"""What stands in a run's way, told before it: checks of a site, of a server, of a run.

Stands on deploy and run.
"""
