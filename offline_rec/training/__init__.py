"""One fit: plan, data, engine, steps, guards, checkpoints, the loop."""
