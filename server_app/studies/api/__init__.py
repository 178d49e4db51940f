"""The commands on finished runs, as functions; ``server_app.api`` offers them with all others.

Each function imports its modules when it is called, because the command line reads only arguments.
"""
