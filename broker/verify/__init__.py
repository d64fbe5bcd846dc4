"""`portalmq verify`: do the replicas hold the same, and what a producer was promised? On the public client."""
