"""What computes gradients for the fit loop: one process, many, many that share the optimizer's state."""
