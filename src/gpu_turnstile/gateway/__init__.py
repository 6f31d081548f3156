"""The data plane: listeners, request intake, relay, upstream pool. Bytes, not objects."""
