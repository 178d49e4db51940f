"""Files of pretrained weights, and the check that they were not trained on a run's own images."""
