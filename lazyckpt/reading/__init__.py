"""The way back: from a file to the objects that it holds."""
