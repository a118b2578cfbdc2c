"""What may be copied lazily: the gate in front of writers, who owns which storage, and whether it stayed as it was."""
