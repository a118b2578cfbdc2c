"""Several ranks that save one checkpoint: who writes what, and how they agree without training's process group."""
