"""What may be copied lazily: who owns which storage, and whether it stayed as it was."""
