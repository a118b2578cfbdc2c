"""Several ranks that save one checkpoint: which rank writes which shard, and how they agree without a process group."""
