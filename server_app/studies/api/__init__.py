"""The commands on finished runs, as functions; ``server_app.api`` has them with all others.

What a function needs is imported when it is called: the command line reads their arguments alone.
"""
