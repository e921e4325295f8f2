"""The outside world: sockets, discovery, clock."""
