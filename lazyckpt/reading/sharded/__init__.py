"""Reads a checkpoint that several ranks wrote: its metadata, and the parts that each rank needs."""
