"""The loop that joins the rooms on one PC."""
