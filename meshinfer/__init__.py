"""Rooms of an agent that runs its part of a language model on one PC of a mesh."""

__version__ = "0.1.0"
