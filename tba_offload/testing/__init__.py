"""What tests, the demo and benchmarks use to try the package on drives that fail."""
