"""Fine-tunes a finished run's model for a new task, and pre-trains backbones."""
