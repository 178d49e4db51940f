"""A hospital's own processes: Flower's SuperNode, and the worker that runs the installed app only.

Stands on the app. Nothing of what comes with a run is executed here, unless the site file says so.
"""
