"""Conversations that survive a swap: saved before an engine leaves the card, given back when it returns."""
