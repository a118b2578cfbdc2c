"""A model of checkpoints on many ranks: what they cost, and what a job gets done when ranks fail."""
