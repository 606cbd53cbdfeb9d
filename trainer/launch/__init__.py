"""The pod's side: it reads the environment, owns torchrun and chooses the exit code. Never imports torch."""
