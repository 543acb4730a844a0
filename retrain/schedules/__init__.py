"""What changes over the steps: the learning rate and the batch size."""
