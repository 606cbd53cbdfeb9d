"""From the start of the supervisor to the exec of torchrun, and how much memory the supervisor keeps."""
