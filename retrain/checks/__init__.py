"""What stops a run before it trains on something wrong."""
