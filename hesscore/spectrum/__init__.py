"""Eigenvalues and traces of symmetric operators that are known by their products alone."""
