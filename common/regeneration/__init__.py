"""The verifier answers prompts: in process or through a server, turn by turn."""
