"""Evidence before a policy is deployed: what it would earn, told from the logged responses alone."""
