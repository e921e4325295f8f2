"""A mesh of real machines in one process under virtual time: every choice comes from the seed."""
