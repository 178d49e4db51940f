"""Tasks: one class each, with the loss, the form of a label, the metrics and what reports show."""
