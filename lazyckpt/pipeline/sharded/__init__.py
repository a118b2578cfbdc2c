"""The save pipeline of a checkpoint that several ranks write together."""
