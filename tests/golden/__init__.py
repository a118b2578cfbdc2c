"""Files that a released version wrote, for all that come: ``make.py`` made them, ``test_golden.py`` reads them.

Each version has its folder. They are never made anew: a change of the formats adds a folder.
"""
