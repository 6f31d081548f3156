"""Decisions. No I/O, no clock, no asyncio, no logging: events in, effects out. Standard library only."""
