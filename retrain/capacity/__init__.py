"""What a step needs: memory, time at the roofline, and cost."""
