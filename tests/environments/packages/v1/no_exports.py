"""A module that is no environment: it exports nothing."""
