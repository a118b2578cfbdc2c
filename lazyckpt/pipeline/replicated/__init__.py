"""The save pipeline of a state that all ranks hold: many of them write one file."""
