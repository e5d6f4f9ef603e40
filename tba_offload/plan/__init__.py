"""From a policy to a frozen plan; pure: no torch, no I/O."""
