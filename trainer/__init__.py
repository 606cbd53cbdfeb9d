"""Ratchet: a training job image for Kubernetes. Progress only moves forward."""

__version__ = "0.1.0"
