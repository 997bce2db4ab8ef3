"""What a model is scored on: read from files, or drawn."""
