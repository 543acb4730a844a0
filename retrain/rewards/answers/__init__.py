"""Final answers: notation, parsing, evaluation and comparison."""
