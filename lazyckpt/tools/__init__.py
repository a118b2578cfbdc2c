"""What looks at checkpoints from outside a training: their contents, checksums, differences and conversions."""
