"""Tools for checkpoints outside of a training. They return typed results and print nothing.

Each takes a path; those that may take long accept ``progress``, which is called with the name of a file, the bytes done
and the bytes in all. Errors are those of ``lazyckpt.errors``.
"""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
