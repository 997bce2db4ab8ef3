"""Curvature as matrices: structured where there is structure, dense on request."""
