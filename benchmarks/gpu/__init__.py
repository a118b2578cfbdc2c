"""The day on a GPU that is lent for minutes: `python -m benchmarks.gpu right` and `… fast`. See docs/internals/gpu.md.

Every stage is a process of its own, so that neither an error that sticks to a CUDA context nor a call that hangs costs
more than its stage. Whatever is finished is on the disk.
"""
