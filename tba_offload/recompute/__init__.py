"""Second runs of layers: given what the first run found, and compared with it."""
