"""Models and cases that tests and benchmarks build."""
