"""How a client reaches the cluster: metadata, retries, brokers found by ZooKeeper."""
