"""The day on a GPU that is lent for minutes. day.py is the program; docs/internals/gpu.md says more.

Every stage is a process of its own, so that neither an error that sticks to a CUDA context nor a call that hangs costs
more than its stage. Whatever is finished is on the disk.
"""
