"""For tests of the package and of what is built on it: drives that fail, and the contract of a store."""
