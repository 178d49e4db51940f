"""The settings of a run: their groups, how they are declared and read, and former names."""
