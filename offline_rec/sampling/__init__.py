"""Drawing from a policy, and what its samples are worth."""
