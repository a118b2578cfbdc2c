"""One save, from its plan to the finished handle: the threads behind it, and the waits for them."""
