"""How an engine is put on the card and taken off."""
