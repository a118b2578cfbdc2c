"""Valid files, changed where they have structure, and given to whatever reads.

``mutate.py`` knows the formats, ``judge.py`` what must hold, ``test_fuzz.py`` runs trials from a seed, and
``make fuzz`` lets atheris look for inputs that reach new code. What is found goes into ``tests/attacks``.
"""
