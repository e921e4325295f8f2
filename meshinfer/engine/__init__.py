"""Running a span on a device."""
