"""What people train with, and whether lazyckpt works with it: one row for each library or recipe.

``make ecosystem`` trains every row in a process of its own, in an environment with the libraries at pinned versions,
and prints the table "Works with" of docs/works-with.md. ``rows.py`` says what a row is.
"""
