"""Cut silos from pools of labelled samples."""
