"""Reads a checkpoint that several ranks wrote: its metadata, and what of it each rank needs."""
