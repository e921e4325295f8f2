"""Who is here, and who owns what; pure state machines."""
