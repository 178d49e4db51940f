"""A backup of a server: one sealed file, made while the server runs, and its restoration."""
