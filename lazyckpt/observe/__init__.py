"""What is told of saves while they run: the timeline, and how often they are worth it."""
