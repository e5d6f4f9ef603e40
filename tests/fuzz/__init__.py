"""Random trainings: a seed draws a model, a loop, an optimizer and a policy; offloading must change no bit.

``choices.py`` lists all that a program may consist of, one line each. ``python -m tests.fuzz`` runs programs.
"""
