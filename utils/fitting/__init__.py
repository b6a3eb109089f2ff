"""Your own model on a card: does it fit, where do the bytes go, what would make it fit, and the script."""
