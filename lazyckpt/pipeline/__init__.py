"""One save from its plan to the handle that is done: the threads behind it, and who waits for them."""
