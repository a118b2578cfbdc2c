"""State providers: base, then objects, then training and composite, in the order of the data."""

from lazyckpt import private_names

private_names.check("python", "torch")
