"""Rounds of sampling and fitting: any regime from on-policy to offline."""
