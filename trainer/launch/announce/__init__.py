"""Telling the control plane how a run goes. Each way is off where it is not offered, and none can hurt a run."""
