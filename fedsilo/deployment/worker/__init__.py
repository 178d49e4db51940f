"""A hospital's own processes: Flower's SuperNode, and a worker that runs only the installed app.

Code that comes with a run is not executed, unless the site file allows it.
"""
