"""What a person meets: command line and local HTTP interface."""
