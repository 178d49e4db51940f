"""The papers' numbers, as data, each with the setting in which it was measured."""
