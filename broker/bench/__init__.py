"""Every benchmark, each beside a yardstick measured in the same run."""
