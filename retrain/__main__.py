"""`python -m retrain`."""

from retrain.cli import main

main()
