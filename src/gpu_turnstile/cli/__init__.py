"""The `turnstile` command."""
