"""Files and folders on the disk: the protocol that commits them, the catalog of checkpoints, and their names."""
