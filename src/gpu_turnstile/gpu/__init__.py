"""What the card says about its memory."""
