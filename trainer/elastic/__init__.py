"""torchrun as Ratchet runs it: torch's rendezvous and agent, ranks that are forked warm, reports of every end."""
