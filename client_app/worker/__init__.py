"""A hospital's own processes: Flower's SuperNode, and the worker that runs the installed app only.

It imports the app. No code that comes with a run is executed, unless the site file allows it.
"""
