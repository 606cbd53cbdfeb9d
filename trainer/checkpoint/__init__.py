"""Checkpoints: what is saved, how it is cut and committed, and how it comes back."""
