"""Plans a run, and starts it: in this process, in worker processes, or with Ray."""
