"""A server or a hospital as a service of systemd: unit files, their installation, log lines."""
