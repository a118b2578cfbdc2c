"""Places for checkpoints that are no mounted folders: object stores."""
