"""The EAGLE-3 draft: packed row, model, attention, losses, float8, export."""
