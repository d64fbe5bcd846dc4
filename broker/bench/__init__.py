"""Benchmarks. Each figure is compared with a yardstick measured in the same run."""
