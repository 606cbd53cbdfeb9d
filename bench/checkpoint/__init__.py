"""What a checkpoint costs a training, and how fast it comes back, against the usual ways."""
