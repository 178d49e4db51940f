"""Checks a site, a server or a run for faults before a run starts."""
