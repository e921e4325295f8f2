"""A model on disk: where it comes from, how it is cut, which bytes a span needs."""
