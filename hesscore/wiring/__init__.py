"""Transformers as graphs of maps.  There is no derivative here: only which map feeds which."""
