"""Starts and ends the processes of a deployment, and makes its keys and kits."""
