"""The rank's side: one process per rank, from start to exit (`worker`)."""
