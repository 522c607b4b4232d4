"""Training a DFlash draft: rows the target wrote, its features, the fit."""
