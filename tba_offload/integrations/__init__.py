"""Callbacks for trainers of other packages: offloading by one line."""
