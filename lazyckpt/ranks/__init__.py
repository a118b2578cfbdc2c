"""Several ranks that save one checkpoint: how they agree, without training's process group."""
