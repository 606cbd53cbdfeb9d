"""Seconds from a failure to the first new step: Ratchet against torchrun with a plain save/resume script."""
