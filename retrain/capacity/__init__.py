"""Memory, time and cost of a step."""
