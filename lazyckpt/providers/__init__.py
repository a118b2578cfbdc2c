"""State providers: base, then objects, then training and composite, in the order of the data."""
