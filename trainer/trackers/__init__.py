"""Trackers: what takes down the course of a training. The protocol is `trainer.plugins.Tracker`."""
