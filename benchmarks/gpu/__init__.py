"""Benchmarks of checkpoints out of a GPU: `python -m benchmarks.gpu`, within a time that is given.

Every part is a process of its own, so that neither an error that sticks to a CUDA context nor a call that hangs costs
more than its part.
"""
