"""Observes saves while they run: the timeline, and how often saving pays."""
