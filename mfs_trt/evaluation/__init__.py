"""What each tier of a family is worth: losses, agreement, latency, and whether it is enough."""
