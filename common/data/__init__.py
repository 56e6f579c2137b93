"""01 and 02: rows to samples with a loss mask; prompts; the vocabulary map."""
