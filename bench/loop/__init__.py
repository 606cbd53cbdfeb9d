"""Steps per second of Ratchet's loop against the same model in a bare DistributedDataParallel loop."""
