"""A run on a real S3 server that is killed twice and loses nothing: `make demo`."""
