"""The parts of reports of each task other than classification: a module each."""
