"""What a run leaves to read: the run log, and the pictures and tables made of run logs.

Nothing here imports torch: a log can be read on a machine that never trains.
"""
