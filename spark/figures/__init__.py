"""The figures of the throughput report, computed in Spark."""
