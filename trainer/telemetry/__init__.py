"""What a run says while it runs: metrics, the channel they travel on, and logs. Never imports torch."""
