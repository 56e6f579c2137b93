"""The hidden-states folder between 03 and 04: files, journal, shards, verification."""
