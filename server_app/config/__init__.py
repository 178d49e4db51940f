"""The settings of a run from every source, and the plugins and files that they name."""
