"""Files and folders on the disk: the protocol that commits them, the catalog of what is committed, and their names."""
