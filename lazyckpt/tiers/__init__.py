"""Mirrors: further places for the checkpoints of a run, which each gets in the background once it is durable here."""
