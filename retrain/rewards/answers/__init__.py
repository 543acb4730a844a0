"""Reading a final answer: its notation, its structure, its value, and when two of them are equal."""
