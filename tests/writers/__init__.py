"""The trial of one promise: a checkpoint holds the state at the moment of ``save()``, whatever code writes afterwards.

``registry.py`` lists the writers, ``ways.py`` the containers they are tried in, ``judge.py`` decides whether what
happened is allowed. ``python -m writers`` (in ``tests/``) prints the table of writers that no witness sees.
"""
