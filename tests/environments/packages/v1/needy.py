"""An environment that needs a package which is not there."""
