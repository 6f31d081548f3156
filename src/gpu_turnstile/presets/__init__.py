"""What can be put on the card: presets and routes."""
