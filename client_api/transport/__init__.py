"""A client's way to the cluster: metadata, retries, brokers found by ZooKeeper."""
