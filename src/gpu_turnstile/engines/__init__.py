"""One file per server dialect. `registry.py` names them all."""
